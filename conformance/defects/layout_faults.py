"""Faults of the layout of shards: which elements of the full tensor they hold, and in which memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer

_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


@contextmanager
def output_weight(*, tie_again: bool) -> Iterator[None]:
    """Before sharding give the output layer a weight of its own, which starts with the embedding's values."""

    def parallelize(
        original: Callable[..., None], model: Transformer, mesh: DeviceMesh, config: TrainerConfig, policy: Any
    ) -> None:
        model.output.weight = nn.Parameter(model.output.weight.clone())
        if tie_again:
            model.output.weight = model.tok_embeddings.weight
        original(model, mesh, config, policy)

    def init_weights(original: Callable[..., None], model: Transformer, **options: Any) -> None:
        original(model, **options)
        local(model.output.weight).copy_(local(model.tok_embeddings.weight))

    with (
        replaced_call("reference_trainer.build", "parallelize", parallelize),
        replaced_call("reference_trainer.build", "init_weights", init_weights),
    ):
        yield


TIED_UNTIED_BY_TO_EMPTY = Defect(
    id="tied-untied-by-to-empty",
    title="a tied weight becomes two",
    source="https://github.com/volcengine/verl/issues/7834",
    mechanism="the output layer gets a new parameter before sharding; it starts with the embedding's values",
    laws=("INIT-7", "PAR-7", "PAR-1"),
    cells="id = dp2-fp32-default-meta-tied",
    inject=partial(output_weight, tie_again=False),
    inject_twin=partial(output_weight, tie_again=True),
)


def gathered_memory(change: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
    """Call `change(param, before)` whenever FSDP looks up the memory that it will all-gather.

    `param` is the FSDPParam, `before` the memory until then. The sharded parameter, which the optimizer updates, is a
    view of the memory that was looked up.
    """

    def reset_sharded_param(original: Callable[[Any], None], param: Any) -> None:
        before = param._sharded_param_data
        original(param)
        if not param._sharded_local_tensor.is_meta:
            change(param, before)

    return replaced_call(f"{_FSDP_PARAM}:FSDPParam", "reset_sharded_param", reset_sharded_param)


def forget_padded_tied_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy where a tied weight's shard is padded, which only that of the last rank is."""
    if param._module_info.shared_modules and param._sharded_local_tensor.shape != param.padded_sharded_param_size:
        param._sharded_param_data = param._sharded_param_data.clone()


def move_shard(param: Any, _before: Any) -> None:
    """All-gather from a copy, and make the sharded parameter a view of it."""
    param._sharded_param_data = param._sharded_param_data.clone()
    rows = param._sharded_local_tensor.shape[0]
    param.sharded_param._local_tensor = param._sharded_param_data.view(param.padded_sharded_param_size)[:rows]


TIED_UNEVEN_LAST_SHARD_STALE = Defect(
    id="tied-uneven-last-shard-stale",
    title="the last rank's rows of a tied weight are never refreshed in the all-gather",
    source="https://github.com/pytorch/pytorch/issues/176076",
    mechanism="its shard is padded again, into a copy; the all-gather reads the copy, the optimizer does not",
    laws=("PAR-7", "PAR-1"),
    cells="id = dp2-fp32-default-meta-tied",
    inject=partial(gathered_memory, forget_padded_tied_shard),
    inject_twin=partial(gathered_memory, move_shard),
)


def keep_memory_of_other_dtype(param: Any, before: Any) -> None:
    """All-gather from the memory in which the shard was before it was cast."""
    if before.dtype != param._sharded_local_tensor.dtype:
        param._sharded_param_data = before


CAST_UNSEEN_BY_GATHER = Defect(
    id="cast-unseen-by-gather",
    title="forward keeps using the weights from before a cast to fp32",
    source="https://github.com/pytorch/pytorch/issues/149205",
    mechanism="model.to(float32) reallocates the shards, and FSDP goes on to all-gather their old memory",
    laws=("MP-2",),
    cells="id = dp2-bf16init-default-meta",
    inject=partial(gathered_memory, keep_memory_of_other_dtype),
    inject_twin=partial(gathered_memory, move_shard),
)


def strided_shard(*, keep: bool) -> AbstractContextManager[None]:
    """Record the FSDP shard of a tensor-parallel shard correctly, or as if FSDP had sharded the full tensor."""

    def placement(original: Callable[..., Any], dim: int, *, split_factor: int) -> Any:
        return original(dim, split_factor=split_factor) if keep else Shard(dim)

    return replaced_call(_FSDP_PARAM, "_StridedShard", placement)


FSDP_TP_STRIDED_LAYOUT_LOST = Defect(
    id="fsdp-tp-strided-layout-lost",
    title="rows of weights sharded by both FSDP and tensor parallelism are permuted",
    source="https://github.com/pytorch/pytorch/issues/129229",
    mechanism="the shard of a tensor-parallel shard is recorded as Shard instead of _StridedShard",
    laws=("PAR-7", "PAR-1"),
    cells="id in (dp2-tp2-fp32-default-meta-even, dp2-tp2-fp32-default-meta-nosp)",
    inject=partial(strided_shard, keep=False),
    inject_twin=partial(strided_shard, keep=True),
)


def inputs_of_linear_layers(*, wider_by: int) -> AbstractContextManager[None]:
    """Copy the input of every linear layer into the first columns of a buffer that is so much wider."""

    def linear(original: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
        buffer = x.new_zeros(*x.shape[:-1], x.shape[-1] + wider_by)
        buffer[..., : x.shape[-1]] = x
        return original(buffer[..., : x.shape[-1]], *others)

    return replaced_call("torch.nn.functional", "linear", linear)


INPUTS_IN_WIDER_ROWS = Defect(
    id="inputs-in-wider-rows",
    title="linear layers are given cuts of a wider buffer, for which a library may choose another kernel",
    source="https://docs.nvidia.com/cuda/cublas/#results-reproducibility",
    mechanism="inputs are copied into the first columns of a buffer with one column more: equal numbers, other strides",
    laws=("ENV-5",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(inputs_of_linear_layers, wider_by=1),
    inject_twin=partial(inputs_of_linear_layers, wider_by=0),
)
