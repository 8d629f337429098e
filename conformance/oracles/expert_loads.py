"""Loads of experts on all data-parallel ranks, which one process computes rank by rank before it computes losses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reference_trainer.model import Transformer


def share_load(model: Transformer, batches: Sequence[Tensor], prepare: Callable[[int], None]) -> None:
    """Let routers balance all ranks' tokens in the next forwards, each of which has those of one rank.

    `batches` are the tokens of each rank, int64 of shape (samples, seq_len); `prepare` gets the rank before each of the
    forwards that count the tokens of each expert. The load changes the balance loss alone, not the choice of experts.
    """
    loads: list[list[Tensor]] = [[] for _ in model.mixtures]
    for mixture, seen in zip(model.mixtures, loads, strict=True):
        mixture.sum_over_ranks = _noting(seen)
    with torch.no_grad():
        for rank, tokens in enumerate(batches):
            prepare(rank)
            model(tokens)
    for mixture, seen in zip(model.mixtures, loads, strict=True):
        mixture.sum_over_ranks = _always(torch.stack(seen).sum(0))


def _noting(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def note(load: Tensor) -> Tensor:
        seen.append(load)
        return load

    return note


def _always(total: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _load: total
