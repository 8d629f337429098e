"""Which groups of parameters FSDP gathers before it is their turn.

A group names the groups that follow it, in the order in which forward or backward enters them. FSDP gathers those that
are not gathered yet, when it has the group's own parameters and before the group computes. An empty list leaves FSDP to
its default.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from torch.distributed.fsdp import FSDPModule

from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.reshard import group_names


def apply_prefetch(model: Transformer, config: TrainerConfig) -> None:
    """To be called when all groups exist. A group of several modules takes what any one of them is told."""

    def module(name: str) -> FSDPModule:
        return cast("FSDPModule", model.get_submodule(name))  # `fully_shard` has added the methods of FSDPModule

    for name, ahead in each_with_next(forward_order(config), config.forward_prefetch):
        module(name).set_modules_to_forward_prefetch([module(other) for other in ahead])
    for name, ahead in each_with_next(backward_order(config), config.backward_prefetch):
        module(name).set_modules_to_backward_prefetch([module(other) for other in ahead])


def each_with_next(names: Sequence[str], number: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Each name with as many of those after it, or fewer at the end."""
    for index, name in enumerate(names, start=1):
        yield name, names[index : index + number]


def forward_order(config: TrainerConfig) -> list[str]:
    """Groups as forward enters them. With tied embeddings it begins with the group of the output."""
    names = group_names(config)
    return names[-1:] + names[:-1] if config.model.tied_embeddings else names


def backward_order(config: TrainerConfig) -> list[str]:
    """Groups as backward enters them: the reverse of how forward leaves them, a block after the norms inside of it."""
    order: list[str] = []
    for _, (*inside, block) in groupby(reversed(group_names(config)), key=_block):
        order += [block, *inside]
    return order


def _block(name: str) -> str:
    """`layers.0` for itself and the norms inside of it."""
    return ".".join(name.split(".")[:2])
