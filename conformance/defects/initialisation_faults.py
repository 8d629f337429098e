"""Faults of first weights: what `to_empty` leaves behind, and what ranks draw."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Defect, replaced
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local
from reference_trainer.model import Transformer


def rope_buffer(*, restore: bool) -> AbstractContextManager[None]:
    """After initialisation put the memory of `to_empty` back into the RoPE buffer, or initialise a second time."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, **options: Any) -> None:
            memory = model.rope_table.clone()
            original(model, **options)
            if restore:
                model.rope_table.copy_(memory)
            else:
                original(model, **options)

        return init_weights

    return replaced("reference_trainer.build", "init_weights", make)


def replica_scale(factor: float) -> AbstractContextManager[None]:
    """After initialisation scale the parameters of the second replica."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, **options: Any) -> None:
            original(model, **options)
            for parameter in model.parameters():
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                if mesh and "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("dp_replicate") == 1:
                    local(parameter).mul_(factor)

        return init_weights

    return replaced("reference_trainer.build", "init_weights", make)


def shard_draw(elements_of: Callable[[DTensor], Tensor]) -> AbstractContextManager[None]:
    """Give each shard the elements of the full initial tensor that `elements_of` names."""

    def make(original: Any) -> Any:
        def assign(target: Tensor, value: Tensor) -> None:
            if isinstance(target, DTensor):
                local(target).copy_(value.flatten()[elements_of(target)])
            else:
                original(target, value)

        return assign

    return replaced("reference_trainer.init_weights", "assign", make)


def first_elements(parameter: DTensor) -> Tensor:
    """As if every rank drew its shard from the same generator."""
    shape = local(parameter).shape
    return torch.arange(shape.numel()).view(shape)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="rope-buffer-uninit",
        title="a non-persistent buffer is left as to_empty handed it out",
        source="https://github.com/huggingface/transformers/issues/45902",
        mechanism="to_empty reallocates buffers; what no state dict restores stays uninitialised",
        laws=("INIT-1", "INIT-2", "PAR-1"),
        inject=partial(rope_buffer, restore=True),
        inject_twin=partial(rope_buffer, restore=False),
    ),
    Defect(
        id="replica-desync",
        title="replicas start from different weights",
        source="https://github.com/pytorch/pytorch/issues/125431",
        mechanism="fully_shard never broadcasts; here the second replica's weights are scaled by 1.05",
        laws=("INIT-2", "PAR-1", "PAR-5"),
        inject=partial(replica_scale, 1.05),
        inject_twin=partial(replica_scale, 1.0),
    ),
    Defect(
        id="init-duplicate-shards",
        title="every shard is initialised with the same numbers",
        source="https://github.com/pytorch/pytorch/issues/196562",
        mechanism="each rank draws its own shard from a generator with the same seed",
        laws=("INIT-2", "PAR-1"),
        inject=partial(shard_draw, first_elements),
        inject_twin=partial(shard_draw, shard_indices),
    ),
)
