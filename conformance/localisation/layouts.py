"""Layouts: the part of a full tensor that a rank of a tensor-parallel group should hold."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from conformance.instruments.taps import PARTIAL, Tap


class Held(NamedTuple):
    """Tensor of one rank of a tensor-parallel group, with its tap."""

    tap: Tap
    tensor: Tensor


def is_partial(tap: Tap) -> bool:
    """Return whether a tensor is declared to be a term of a sum over a mesh dimension."""
    return tap.placements is not None and PARTIAL in tap.placements.values()


def expected_shard(full: Tensor, group: Sequence[Held], index: int) -> Tensor | None:
    """Return the part of a full tensor that member `index` of a group should hold; None if no layout fits its shape.

    A DTensor is cut by its placements, as `torch.chunk` cuts. A plain tensor is cut along the only dimension in which
    the sizes of all members add up to that of the full tensor.
    """
    held = group[index]
    if tuple(held.tensor.shape) == tuple(full.shape):
        return full
    dim = _sharded_dim(full, group)
    if dim is None:
        return None
    sizes = [member.tensor.shape[dim] for member in group]
    return full.narrow(dim, sum(sizes[:index]), sizes[index])


def _sharded_dim(full: Tensor, group: Sequence[Held]) -> int | None:
    """Return the dimension along which the members' tensors make up the full one, None if there is none."""
    shapes = [tuple(member.tensor.shape) for member in group]
    if any(len(shape) != full.ndim for shape in shapes):
        return None
    for dim in range(full.ndim):
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        expected = (*full.shape[:dim], *full.shape[dim + 1 :])
        if others == {expected} and sum(shape[dim] for shape in shapes) == full.shape[dim]:
            return dim
    return None
