"""Experts in one process: data-parallel ranks go through the model in lockstep, and meet at its routers and experts.

Routers balance the tokens of all ranks. An expert multiplies the rows of several ranks at once, and its gradients are
sums over them: the kernels, and with them every bit, are those of a run only if the rows are the same. Each rank has a
copy of the model, with the experts that it holds (arXiv:2006.16668, section 3.1: experts are divided among devices, all
other parameters are not).
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from conformance.numerics.lockstep import Lockstep
from conformance.oracles.reference import Tensors
from reference_trainer.model import Transformer

_Experts = Callable[[Tensor, Tensor], Tensor]
"""Function of rows, and of the number of rows of each expert, that returns the results of the rows."""


class ExpertParallelForward:
    """Models of all data-parallel ranks, which compute in lockstep; consecutive `ep` ranks divide the experts."""

    def __init__(self, model: Transformer, *, ranks: int, ep: int) -> None:
        self._ep, self._lockstep = ep, Lockstep(ranks)
        self.models = [_with_own_experts(model, holder=rank % ep, ep=ep) for rank in range(ranks)]
        """Model of each rank."""
        for rank, own in enumerate(self.models):
            for mixture in own.mixtures:
                mixture.sum_over_ranks = partial(self._sum_over_ranks, rank)
                if ep > 1:
                    mixture.dispatch = partial(self._dispatch, rank)

    def losses(self, functions: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Return the results of functions of each rank, which call its model."""
        return self._lockstep.run(functions)

    def _sum_over_ranks(self, rank: int, load: Tensor) -> Tensor:
        return self._lockstep.meet(rank, load, lambda loads: len(loads) * [torch.stack(tuple(loads)).sum(0)])

    def _dispatch(self, rank: int, experts: _Experts, rows: Tensor, counts: Tensor) -> Tensor:
        return self._lockstep.meet(rank, _Rows(experts, rows, counts), self._computed)

    def _computed(self, ranks: Sequence["_Rows"]) -> list[Tensor]:
        groups = [ranks[first : first + self._ep] for first in range(0, len(ranks), self._ep)]
        return [results for group in groups for results in _results(group)]


class _Rows(NamedTuple):
    """Rows of a rank, sorted by expert, and the experts that the rank holds."""

    experts: _Experts
    rows: Tensor
    counts: Tensor
    """Number of rows by expert, of all experts."""


def _with_own_experts(model: Transformer, *, holder: int, ep: int) -> Transformer:
    """Return a copy of a model with the experts that one of `ep` ranks holds."""
    own = copy.deepcopy(model)
    for mixture in own.mixtures:
        for name, weight in list(mixture.experts.named_parameters()):
            mixture.experts.register_parameter(name, nn.Parameter(weight.detach().chunk(ep)[holder].clone()))
    return own


def _results(group: Sequence[_Rows]) -> list[Tensor]:
    """Results of the rows of each rank of a group, which divides the experts."""
    chunks = [torch.split(own.rows, own.counts.tolist()) for own in group]
    results: list[list[Tensor]] = [[] for _ in group]
    for holder, held in zip(group, torch.stack([own.counts for own in group]).chunk(len(group), dim=1), strict=True):
        first = len(results[0])
        experts = range(first, first + held.shape[1])
        together = torch.cat([own[expert] for expert in experts for own in chunks])
        computed = torch.split(holder.experts(together, held.sum(0)), held.T.flatten().tolist())
        for rank, own_results in enumerate(results):
            own_results += computed[rank :: len(group)]
    return [torch.cat(each) for each in results]


def joined_experts(ranks: Sequence[Tensors], *, ep: int) -> list[Tensors]:
    """Return the gradients of all experts of each group of `ep` ranks, which hold them, by parameter name."""
    groups = [ranks[first : first + ep] for first in range(0, len(ranks), ep)]
    return [
        {name: torch.cat([own[name] for own in group]) for name in group[0] if is_of_experts(name)} for group in groups
    ]


def is_of_experts(parameter: str) -> bool:
    """Return whether a parameter stacks experts."""
    return ".experts." in parameter
