"""Faults of first weights: what `to_empty` leaves behind, and what ranks draw."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Defect, replaced
from conformance.instruments.capture import shard_indices
from conformance.instruments.sharding import local
from reference_trainer.model import Transformer


def around_init(change: Callable[[Callable[[], None], Transformer], None]) -> AbstractContextManager[None]:
    """Replace `init_weights` by a function that is given it, with its arguments bound, and the model."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, **options: Any) -> None:
            change(partial(original, model, **options), model)

        return init_weights

    return replaced("reference_trainer.build", "init_weights", make)


def forgotten(tensor_of: Callable[[Transformer], Tensor], *, restore: bool) -> AbstractContextManager[None]:
    """After initialisation put the memory of `to_empty` back into a tensor, or initialise a second time."""

    def change(init: Callable[[], None], model: Transformer) -> None:
        memory = tensor_of(model).clone()
        init()
        if restore:
            tensor_of(model).copy_(memory)
        else:
            init()

    return around_init(change)


def rope_table(model: Transformer) -> Tensor:
    return model.rope_table


def last_row(model: Transformer) -> Tensor:
    """Of the last rank's part of an unevenly sharded embedding; of the others nothing."""
    part = local(model.tok_embeddings.weight)
    return part[-1:] if dist.get_rank() == dist.get_world_size() - 1 else part[:0]


def left_out(*, repeat: bool) -> AbstractContextManager[None]:
    """Leave `init_weights` out, or call it a second time."""

    def change(init: Callable[[], None], _model: Transformer) -> None:
        if repeat:
            init()
            init()

    return around_init(change)


def buffer_of_other_ranks(factor: float) -> AbstractContextManager[None]:
    """After initialisation scale the RoPE table of all ranks but the first."""

    def change(init: Callable[[], None], model: Transformer) -> None:
        init()
        if dist.get_rank() > 0:
            model.rope_table.mul_(factor)

    return around_init(change)


def names_drawn_from(rename: Callable[[str], str]) -> AbstractContextManager[None]:
    """Draw each parameter from the generator of another name."""
    return replaced(
        "reference_trainer.init_weights", "_generator", lambda original: lambda name, seed: original(rename(name), seed)
    )


def without_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.0.", name)


def scaled_draw(factor: float) -> AbstractContextManager[None]:
    """Scale all normal numbers that are drawn."""

    def make(original: Any) -> Any:
        def normal(shape: tuple[int, ...], **options: Any) -> Tensor:
            drawn: Tensor = original(shape, **options)
            return drawn.mul_(factor)

        return normal

    return replaced("reference_trainer.init_weights", "normal", make)


def kept_while_building(keep: Callable[[Tensor], object]) -> AbstractContextManager[None]:
    """Keep something of every full tensor that is drawn, until the model is built."""
    kept: list[object] = []

    def make(original: Any) -> Any:
        def assign(target: Tensor, value: Tensor) -> None:
            kept.append(keep(value))
            original(target, value)

        return assign

    return replaced("reference_trainer.init_weights", "assign", make)


def whole(value: Tensor) -> object:
    return value


def shape_alone(value: Tensor) -> object:
    return value.shape


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
        inject=partial(forgotten, rope_table, restore=True),
        inject_twin=partial(forgotten, rope_table, restore=False),
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
    Defect(
        id="init-left-out",
        title="nothing is initialised after to_empty",
        source="https://github.com/pytorch/torchtitan/issues/110",
        mechanism="init_weights is not called",
        laws=("INIT-1", "INIT-2"),
        inject=partial(left_out, repeat=False),
        inject_twin=partial(left_out, repeat=True),
    ),
    Defect(
        id="last-row-uninit",
        title="the last row of an uneven shard is left as to_empty handed it out",
        source="https://github.com/pytorch/pytorch/issues/176076",
        mechanism="the last rank's part of the embedding keeps the memory of its last row",
        laws=("INIT-1", "INIT-2"),
        inject=partial(forgotten, last_row, restore=True),
        inject_twin=partial(forgotten, last_row, restore=False),
    ),
    Defect(
        id="buffer-wrong-off-rank0",
        title="a buffer is right on the first rank alone",
        source="https://github.com/pytorch/pytorch/issues/178569",
        mechanism="the RoPE table of the other ranks is scaled by 1.7",
        laws=("INIT-2", "PAR-5"),
        inject=partial(buffer_of_other_ranks, 1.7),
        inject_twin=partial(buffer_of_other_ranks, 1.0),
    ),
    Defect(
        id="layers-alike",
        title="all layers begin with the same weights",
        source="https://github.com/allenai/OLMo-core/issues/307",
        mechanism="the generator's key leaves out the number of the layer",
        laws=("INIT-3", "INIT-2"),
        inject=partial(names_drawn_from, without_layer),
        inject_twin=partial(names_drawn_from, str),
    ),
    Defect(
        id="init-std-wrong",
        title="weights are drawn with another standard deviation than was asked for",
        source="https://github.com/pytorch/torchtitan/issues/4600",
        mechanism="all normal numbers are scaled by 1.5",
        laws=("INIT-3", "INIT-2"),
        inject=partial(scaled_draw, 1.5),
        inject_twin=partial(scaled_draw, 1.0),
    ),
    Defect(
        id="full-model-held",
        title="a rank holds the full model while it builds its shards",
        source="https://github.com/pytorch/torchtitan/issues/1777",
        mechanism="full tensors that were drawn are kept until the end",
        laws=("INIT-6",),
        inject=partial(kept_while_building, whole),
        inject_twin=partial(kept_while_building, shape_alone),
    ),
)
