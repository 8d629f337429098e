"""Reductions of gloo that add in the order of NCCL's ring, or of a tree, and divide before they add, as NCCL does.

For a mean, NCCL multiplies by 1/n before it adds (`ncclAvg` in src/enqueue.cc of https://github.com/NVIDIA/nccl). The
order of its ring is that of `rings`; a tree adds neighbours first. Gloo gathers all terms, and each rank adds up its
share.

Operators of `c10d` are replaced on the CPU: all reductions of `torch.distributed` and of functional collectives call
them. `allreduce_coalesced_`, which the suite does not use, is not replaced.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.numerics.arithmetic import Sums
from conformance.numerics.rings import NCCL_RING, ring_sum

c10d = torch.ops.c10d
_installed: dict[Sums, torch.library.Library] = {}
"""The library by its order, for the lifetime of the process."""


def install(order: Sums) -> None:
    """Replace gloo's reductions in this process, permanently.

    Raises ValueError for another order than before, and RuntimeError for a torch that does not expose the process group
    of an operator to Python; 2.7 does.
    """
    if order in _installed:
        return
    if _installed:
        raise ValueError(f"reductions of this process are in another order already than {order}")
    if not hasattr(dist.ProcessGroup, "unbox"):
        raise RuntimeError(f"torch {torch.__version__} has no ProcessGroup.unbox, which --sums {order} needs")
    library = torch.library.Library("c10d", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # that kernels are overridden, which is the purpose
        warnings.simplefilter("ignore")
        for name, kernel in _Reductions(order).table.items():
            library.impl(name, kernel)  # type: ignore[no-untyped-call]
    _installed[order] = library


class _Reductions:
    """Reductions whose arguments and results are those of the operators in `table`."""

    def __init__(self, order: Sums) -> None:
        self._order = order
        self.table: dict[str, Callable[..., Any]] = {
            "allreduce_": self.all_reduce,
            "_reduce_scatter_base_": self.reduce_scatter,
            "reduce_scatter_tensor_coalesced_": self.reduce_scatters,
        }

    def all_reduce(
        self, tensors: list[Tensor], group: Any, operation: Any, _sparse: Any, _async: bool = True, limit: int = -1
    ) -> tuple[list[Tensor], Any]:
        (tensor,) = tensors
        kind = _kind(group, operation, limit)
        if kind in ("max", "min"):  # the same in any order, except for NaN
            return tensors, c10d.allreduce_coalesced_.default(tensors, group, operation, True, limit)
        terms, work = _gathered(tensor, group, limit)
        tensor.copy_(self._reduced(terms, kind, scattered=False))
        return tensors, work

    def reduce_scatter(
        self, output: Tensor, given: Tensor, group: Any, operation: Any, _async: bool = True, limit: int = -1
    ) -> tuple[Tensor, Any]:
        terms, work = _gathered(given, group, limit)
        kind = _kind(group, operation, limit)
        reduced = self._reduced([term.flatten() for term in terms], kind, scattered=True)
        rank = dist.ProcessGroup.unbox(group).rank()
        output.copy_(reduced.chunk(len(terms))[rank].view_as(output))
        return output, work

    def reduce_scatters(
        self,
        outputs: list[Tensor],
        given: list[Tensor],
        group: Any,
        operation: Any,
        _async: bool = True,
        limit: int = -1,
    ) -> Any:
        works = [
            self.reduce_scatter(o, i, group, operation, True, limit)[1] for o, i in zip(outputs, given, strict=True)
        ]
        return works[-1]

    def _reduced(self, terms: Sequence[Tensor], kind: str, *, scattered: bool) -> Tensor:
        if kind not in ("sum", "mean"):
            raise NotImplementedError(f"--sums {self._order} knows no reduce-scatter of {kind}")
        if kind == "mean":
            factor = torch.tensor(1.0 / len(terms), dtype=torch.float32).to(terms[0].dtype)
            terms = [term * factor for term in terms]
        if self._order == "tree":
            return _tree_sum(terms)
        return ring_sum(terms, dim=0 if scattered else None, ring=NCCL_RING)


def _tree_sum(terms: Sequence[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [reduce(add, terms[first : first + 2]) for first in range(0, len(terms), 2)]
    return terms[0]


def _gathered(tensor: Tensor, group: Any, limit: int) -> tuple[list[Tensor], Any]:
    """Return the tensors of all ranks, and the finished work of the gathering."""
    ranks = dist.ProcessGroup.unbox(group).size()
    gathered = tensor.new_empty(ranks * tensor.numel())
    _, work = c10d._allgather_base_.default(gathered, tensor.flatten(), group, True, limit)
    dist.Work.unbox(work).wait()
    return [term.view(tensor.shape) for term in gathered.chunk(ranks)], work


def _kind(group: Any, operation: Any, limit: int) -> str:
    """Return `sum`, `mean`, `max` or `min`, deduced from gloo's reduction of the numbers 1, 2, ..., n.

    Up to torch 2.14 Python cannot read a boxed ReduceOp. Raises NotImplementedError for another reduction.
    """
    group_of = dist.ProcessGroup.unbox(group)
    number, ranks = torch.tensor([group_of.rank() + 1.0], dtype=torch.float32), group_of.size()
    dist.Work.unbox(c10d.allreduce_coalesced_.default([number], group, operation, True, limit)).wait()
    kinds = {1.0: "min", float(ranks): "max", (ranks + 1) / 2: "mean", ranks * (ranks + 1) / 2: "sum"}
    if number.item() not in kinds:
        raise NotImplementedError(f"--sums knows sums, means, maxima and minima, and not {operation}")
    return kinds[number.item()]
