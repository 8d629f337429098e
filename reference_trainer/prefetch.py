"""Explicit prefetching: the groups of parameters that FSDP all-gathers ahead of time.

A group names the groups that follow it, in the order in which forward or backward enters them. As soon as FSDP has the
group's own parameters, and before the group computes, it all-gathers those of the named groups that are not gathered
yet. An empty list keeps FSDP's default.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from torch.distributed.fsdp import FSDPModule

from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.reshard import group_names


def apply_prefetch(model: Transformer, config: TrainerConfig) -> None:
    """Set the groups that each group prefetches; all groups must exist. Any module of a group may be used."""

    def module(name: str) -> FSDPModule:
        return cast("FSDPModule", model.get_submodule(name))  # `fully_shard` has added the methods of FSDPModule

    for name, next_names in each_with_next(forward_order(config), config.forward_prefetch):
        module(name).set_modules_to_forward_prefetch([module(other) for other in next_names])
    for name, next_names in each_with_next(backward_order(config), config.backward_prefetch):
        module(name).set_modules_to_backward_prefetch([module(other) for other in next_names])


def each_with_next(names: Sequence[str], number: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each name with the `number` names after it, or fewer at the end."""
    for index, name in enumerate(names, start=1):
        yield name, names[index : index + number]


def forward_order(config: TrainerConfig) -> list[str]:
    """Return the groups as forward enters them; with tied embeddings forward begins with the group of the output."""
    names = group_names(config)
    return names[-1:] + names[:-1] if config.model.tied_embeddings else names


def backward_order(config: TrainerConfig) -> list[str]:
    """Return the groups as backward enters them: the reverse of how forward leaves them, blocks before their norms.

    Forward leaves a block after the norms inside of it.
    """
    order: list[str] = []
    for _, (*inside, block) in groupby(reversed(group_names(config)), key=_block):
        order += [block, *inside]
    return order


def _block(name: str) -> str:
    """Return `layers.0` for the block itself and for the norms inside of it."""
    return ".".join(name.split(".")[:2])
