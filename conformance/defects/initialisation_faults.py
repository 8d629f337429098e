"""Faults of initial weights: memory of `to_empty` that stays uninitialised, and values that ranks sample wrongly."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Defect, repeated_call, replaced_call
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local
from reference_trainer.model import Transformer


def initialisation(change: Callable[[Callable[[], None], Transformer], None]) -> AbstractContextManager[None]:
    """Replace `init_weights` by `change`, which is given the original with its arguments bound, and the model."""

    def init_weights(original: Callable[..., None], model: Transformer, **options: Any) -> None:
        change(partial(original, model, **options), model)

    return replaced_call("reference_trainer.build", "init_weights", init_weights)


def uninitialised(tensor_of: Callable[[Transformer], Tensor], *, restore: bool) -> AbstractContextManager[None]:
    """After initialisation restore what a tensor held before, or initialise a second time."""

    def change(init: Callable[[], None], model: Transformer) -> None:
        before = tensor_of(model).clone()
        init()
        if restore:
            tensor_of(model).copy_(before)
        else:
            init()

    return initialisation(change)


def rope_table(model: Transformer) -> Tensor:
    """Return the RoPE table, a buffer that no state dict holds."""
    return model.rope_table


ROPE_BUFFER_UNINIT = Defect(
    id="rope-buffer-uninit",
    title="a non-persistent buffer keeps the memory that to_empty allocated",
    source="https://github.com/huggingface/transformers/issues/45902",
    mechanism="to_empty reallocates buffers; what no state dict restores stays uninitialised",
    laws=("INIT-1", "INIT-2", "PAR-1"),
    cells="id = dp2-fp32-default-meta-tied",
    inject=partial(uninitialised, rope_table, restore=True),
    inject_twin=partial(uninitialised, rope_table, restore=False),
)


def replica_scale(factor: float) -> AbstractContextManager[None]:
    """After initialisation scale the parameters of the second replica."""

    def change(init: Callable[[], None], model: Transformer) -> None:
        init()
        for parameter in model.parameters():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if mesh and "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("dp_replicate") == 1:
                local(parameter).mul_(factor)

    return initialisation(change)


REPLICA_DESYNC = Defect(
    id="replica-desync",
    title="replicas start from different weights",
    source="https://github.com/pytorch/pytorch/issues/125431",
    mechanism="fully_shard never broadcasts; here the second replica's weights are scaled by 1.05",
    laws=("INIT-2", "PAR-1", "PAR-5"),
    cells="id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1)",
    inject=partial(replica_scale, 1.05),
    inject_twin=partial(replica_scale, 1.0),
)


def shards_assigned(elements_of: Callable[[DTensor], Tensor]) -> AbstractContextManager[None]:
    """Give each shard the elements of the full initial tensor whose flat indices `elements_of(parameter)` returns."""

    def assign(original: Callable[[Tensor, Tensor], None], target: Tensor, value: Tensor) -> None:
        if isinstance(target, DTensor):
            local(target).copy_(value.flatten()[elements_of(target)])
        else:
            original(target, value)

    return replaced_call("reference_trainer.init_weights", "assign", assign)


def first_elements(parameter: DTensor) -> Tensor:
    """Return the indices that a shard would have if every rank sampled its own from the same generator."""
    shape = local(parameter).shape
    return torch.arange(shape.numel()).view(shape)


INIT_DUPLICATE_SHARDS = Defect(
    id="init-duplicate-shards",
    title="every shard is initialised with the same numbers",
    source="https://github.com/pytorch/pytorch/issues/196562",
    mechanism="each rank samples its own shard from a generator with the same seed",
    laws=("INIT-2", "PAR-1"),
    cells="id = dp2-fp32-default-meta-tied",
    inject=partial(shards_assigned, first_elements),
    inject_twin=partial(shards_assigned, shard_indices),
)


INIT_LEFT_OUT = Defect(
    id="init-left-out",
    title="nothing is initialised after to_empty",
    source="https://github.com/pytorch/torchtitan/issues/110",
    mechanism="init_weights is not called",
    laws=("INIT-1", "INIT-2"),
    cells="id = dp2-fp32-default-meta-tied",
    inject=partial(repeated_call, "reference_trainer.build", "init_weights", times=0),
    inject_twin=partial(repeated_call, "reference_trainer.build", "init_weights", times=2),
)


def last_row(model: Transformer) -> Tensor:
    """Return the last row of the embedding's shard on the last rank, and no row on all others."""
    shard = local(model.tok_embeddings.weight)
    return shard[-1:] if dist.get_rank() == dist.get_world_size() - 1 else shard[:0]


LAST_ROW_UNINIT = Defect(
    id="last-row-uninit",
    title="the last row of an uneven shard keeps the memory that to_empty allocated",
    source="https://github.com/pytorch/pytorch/issues/176076",
    mechanism="initialisation leaves out the last row of the last rank's shard of the embedding",
    laws=("INIT-1", "INIT-2"),
    cells="id in (dp2-fp32-default-meta-uneven, "
    "dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1)",
    inject=partial(uninitialised, last_row, restore=True),
    inject_twin=partial(uninitialised, last_row, restore=False),
)


def buffer_of_other_ranks(factor: float) -> AbstractContextManager[None]:
    """After initialisation scale the RoPE table of all ranks but the first."""

    def change(init: Callable[[], None], model: Transformer) -> None:
        init()
        if dist.get_rank() > 0:
            model.rope_table.mul_(factor)

    return initialisation(change)


BUFFER_WRONG_OFF_RANK0 = Defect(
    id="buffer-wrong-off-rank0",
    title="a buffer is right on the first rank alone",
    source="https://github.com/pytorch/pytorch/issues/178569",
    mechanism="the RoPE table of the other ranks is scaled by 1.7",
    laws=("INIT-2", "PAR-5"),
    cells="id in (tp2-fp32-default-meta, dp2-fp32-default-meta-tied)",
    inject=partial(buffer_of_other_ranks, 1.7),
    inject_twin=partial(buffer_of_other_ranks, 1.0),
)


def generator_names(rename: Callable[[str], str]) -> AbstractContextManager[None]:
    """Sample each parameter from the generator of `rename(name)`."""
    return replaced_call(
        "reference_trainer.init_weights", "_generator", lambda original, name, seed: original(rename(name), seed)
    )


def without_layer(name: str) -> str:
    """Return the name of the same parameter in the first layer."""
    return re.sub(r"^layers\.\d+\.", "layers.0.", name)


LAYERS_ALIKE = Defect(
    id="layers-alike",
    title="all layers begin with the same weights",
    source="https://github.com/allenai/OLMo-core/issues/307",
    mechanism="the generator's key leaves out the number of the layer",
    laws=("INIT-3", "INIT-2"),
    cells="id = dp2-fp32-default-meta",
    inject=partial(generator_names, without_layer),
    inject_twin=partial(generator_names, str),
)


def normal_scale(factor: float) -> AbstractContextManager[None]:
    """Scale all normal numbers that initialisation samples."""

    def normal(original: Callable[..., Tensor], shape: tuple[int, ...], **options: Any) -> Tensor:
        return original(shape, **options).mul_(factor)

    return replaced_call("reference_trainer.init_weights", "normal", normal)


INIT_STD_WRONG = Defect(
    id="init-std-wrong",
    title="weights are sampled with another standard deviation than the configured one",
    source="https://github.com/pytorch/torchtitan/issues/4600",
    mechanism="all normal numbers are scaled by 1.5",
    laws=("INIT-3", "INIT-2"),
    cells="id = dp2-fp32-default-meta",
    inject=partial(normal_scale, 1.5),
    inject_twin=partial(normal_scale, 1.0),
)


def kept_while_building(keep: Callable[[Tensor], object]) -> AbstractContextManager[None]:
    """Hold `keep(value)` of every full tensor that is sampled, for as long as the fault is in force."""
    kept: list[object] = []

    def assign(original: Callable[[Tensor, Tensor], None], target: Tensor, value: Tensor) -> None:
        kept.append(keep(value))
        original(target, value)

    return replaced_call("reference_trainer.init_weights", "assign", assign)


def full_value(value: Tensor) -> object:
    """Return the full tensor itself."""
    return value


def shape_alone(value: Tensor) -> object:
    """Return the shape of the full tensor."""
    return value.shape


FULL_MODEL_HELD = Defect(
    id="full-model-held",
    title="a rank holds the full model while it builds its shards",
    source="https://github.com/pytorch/torchtitan/issues/1777",
    mechanism="full tensors that were sampled are kept until the end",
    laws=("INIT-6",),
    cells="id = dp4-fp32-table-meta-deep",
    inject=partial(kept_while_building, full_value),
    inject_twin=partial(kept_while_building, shape_alone),
)
