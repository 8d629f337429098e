"""Faults of where shards lie: in the full tensor, and in memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer

_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


def gathered_memory(change: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    """Whenever FSDP looks up the memory that it will all-gather, change that.

    `change` is given the FSDPParam and the memory before; the shard itself, which the optimizer updates, is a view of
    what was looked up.
    """

    def make(original: Any) -> Any:
        def reset_sharded_param(param: Any) -> None:
            before = param._sharded_param_data
            original(param)
            if not param._sharded_local_tensor.is_meta:
                change(param, before)

        return reset_sharded_param

    return replaced(f"{_FSDP_PARAM}:FSDPParam", "reset_sharded_param", make)


def forget_padded_tied_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy where a tied weight's shard is padded, as that of the last rank is."""
    if param._module_info.shared_modules and param._sharded_local_tensor.shape != param.padded_sharded_param_size:
        param._sharded_param_data = param._sharded_param_data.clone()


def keep_memory_of_other_dtype(param: Any, before: Any) -> None:
    """All-gather from where the shard was before it was cast."""
    if before.dtype != param._sharded_local_tensor.dtype:
        param._sharded_param_data = before


def move_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy, and make the shard a view of it."""
    param._sharded_param_data = param._sharded_param_data.clone()
    rows = param._sharded_local_tensor.shape[0]
    param.sharded_param._local_tensor = param._sharded_param_data.view(param.padded_sharded_param_size)[:rows]


def strided_shard(*, keep: bool) -> AbstractContextManager[None]:
    """Record the FSDP shard of a tensor-parallel shard as what it is, or as if FSDP had divided the full tensor."""

    def make(original: Any) -> Any:
        def placement(dim: int, *, split_factor: int) -> Any:
            return original(dim, split_factor=split_factor) if keep else Shard(dim)

        return placement

    return replaced(_FSDP_PARAM, "_StridedShard", make)


@contextmanager
def output_weight(*, tie_again: bool) -> Iterator[None]:
    """Before sharding give the output layer a weight of its own, which starts as the embedding's does."""

    def part(original: Any) -> Any:
        def parallelize(model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any) -> None:
            model.output.weight = nn.Parameter(model.output.weight.clone())
            if tie_again:
                model.output.weight = model.tok_embeddings.weight
            original(model, mesh, config, policy)

        return parallelize

    def start_equal(original: Any) -> Any:
        def init_weights(model: Transformer, **options: Any) -> None:
            original(model, **options)
            local(model.output.weight).copy_(local(model.tok_embeddings.weight))

        return init_weights

    with (
        replaced("reference_trainer.build", "parallelize", part),
        replaced("reference_trainer.build", "init_weights", start_equal),
    ):
        yield


DEFECTS = (
    Defect(
        id="tied-untied-by-to-empty",
        title="a tied weight becomes two",
        source="https://github.com/volcengine/verl/issues/7834",
        mechanism="the output layer gets a new parameter before sharding; it starts with the embedding's values",
        laws=("INIT-7", "PAR-7", "PAR-1"),
        inject=partial(output_weight, tie_again=False),
        inject_twin=partial(output_weight, tie_again=True),
    ),
    Defect(
        id="tied-uneven-last-shard-stale",
        title="the last rank's rows of a tied weight are never refreshed in the all-gather",
        source="https://github.com/pytorch/pytorch/issues/176076",
        mechanism="its shard is padded again, into a copy; the all-gather reads the copy, the optimizer does not",
        laws=("PAR-7", "PAR-1"),
        inject=partial(gathered_memory, forget_padded_tied_shard),
        inject_twin=partial(gathered_memory, move_shard),
    ),
    Defect(
        id="cast-unseen-by-gather",
        title="forward keeps using the weights from before a cast to fp32",
        source="https://github.com/pytorch/pytorch/issues/149205",
        mechanism="model.to(float32) moves the shards, and FSDP goes on to all-gather their old memory",
        laws=("MP-2",),
        inject=partial(gathered_memory, keep_memory_of_other_dtype),
        inject_twin=partial(gathered_memory, move_shard),
    ),
    Defect(
        id="fsdp-tp-strided-layout-lost",
        title="rows of weights sharded by both FSDP and tensor parallelism are permuted",
        source="https://github.com/pytorch/pytorch/issues/129229",
        mechanism="the shard of a tensor-parallel shard is recorded as Shard instead of _StridedShard",
        laws=("PAR-7", "PAR-1"),
        inject=partial(strided_shard, keep=False),
        inject_twin=partial(strided_shard, keep=True),
    ),
)
