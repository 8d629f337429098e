"""Orders in which the rings of communication libraries add the ranks' terms of a chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from conformance.numerics.arithmetic import Arithmetic


@dataclass(frozen=True)
class Ring:
    """Path of a library's ring through the ranks, and its division of an all-reduce's tensor into chunks."""

    step: int
    """Chunk c passes the ranks c + step, c + 2 step, ..., c."""
    multiple_numel: int = 1
    """Number of elements that divides the size of all chunks but the last."""
    multiple_bytes: int = 1
    """Bytes that divide the size of all chunks but the last."""

    def chunk_numel(self, flat: Tensor, count: int) -> int:
        """Return the elements of one of the `count` chunks of a flat tensor."""
        multiple = max(self.multiple_numel, self.multiple_bytes // flat.element_size())
        return max(1, -(-flat.numel() // (count * multiple)) * multiple)


GLOO_RING = Ring(step=-1, multiple_numel=2)
"""gloo/allreduce.cc of https://github.com/pytorch/gloo; each chunk is two segments of equal length."""
NCCL_RING = Ring(step=1, multiple_bytes=16)
"""src/device/all_reduce.h of https://github.com/NVIDIA/nccl, in one channel (`NCCL_MAX_CTAS`)."""


def ring_of(device_type: str) -> Ring:
    """Return the ring by which ranks add on a type of device: NCCL's on CUDA, or with `--sums ring`."""
    return NCCL_RING if device_type == "cuda" or Arithmetic.here().sums == "ring" else GLOO_RING


def ring_sum(terms: Sequence[Tensor], *, dim: int | None, ring: Ring) -> Tensor:
    """Return the sum of a tensor of each rank, rounded after each addition as a ring does.

    The tensors have equal shapes and dtypes, as has the sum. They are cut into a chunk for each rank, along `dim` (a
    reduce-scatter) or as flat memory (an all-reduce, None). For two ranks any order is the same.
    """
    count = len(terms)
    if count == 2:
        return terms[0] + terms[1]
    if dim is None:
        flat = [term.flatten() for term in terms]
        size = ring.chunk_numel(flat[0], count)
        return torch.cat(_sums([torch.split(term, size) for term in flat], ring)).view_as(terms[0])
    return torch.cat(_sums([term.chunk(count, dim) for term in terms], ring), dim)


def _sums(chunks: Sequence[Sequence[Tensor]], ring: Ring) -> list[Tensor]:
    count = len(chunks)
    return [
        reduce(add, [chunks[(c + ring.step * k) % count][c] for k in range(1, count + 1)])
        for c in range(len(chunks[0]))
    ]


def is_ring_sum(terms: Sequence[Sequence[float]], totals: Sequence[Sequence[float]], ring: Ring) -> bool:
    """Return whether all-reduced sums of bf16 numbers over ranks equal a `ring_sum` in every bit.

    `terms` has the numbers of each rank, `totals` their sums as each rank has them.
    """
    expected = ring_sum([torch.tensor(numbers, dtype=torch.bfloat16) for numbers in terms], dim=None, ring=ring)
    return all(torch.equal(torch.tensor(total, dtype=torch.bfloat16), expected) for total in totals)
