"""Samples of a sweep that a profile has time for: a share, which the seed of the cell draws, with each kind of sample.

A profile without `sweep_share` in matrix.yaml tries all samples, and so does a defect that names subjects. What is
known to fail in some version of torch is left out of a share: it takes longest, and other profiles show it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from conformance.experiments.context import RankWorld
from conformance.sweeps.covering_sweep import Draw, Options

Sample = TypeVar("Sample")


def share_of(
    samples: Iterable[Sample], kinds: Callable[[Sample], Iterable[Hashable]], *, share: float, seed: int
) -> list[Sample]:
    """Return a share of samples in their order, by seed; at least one of each kind, of which a sample may have several.

    >>> share_of(["a1", "a2", "a3", "b1"], lambda sample: sample[0], share=0.5, seed=0)
    ['a2', 'b1']
    """
    every = list(samples)
    order = Random(seed).sample(range(len(every)), len(every))
    chosen, seen = list[int](), set[Hashable]()
    for index in order:
        if not seen.issuperset(found := {*kinds(every[index])}):
            chosen.append(index)
            seen |= found
    others = [index for index in order if index not in chosen]
    chosen += others[: max(0, round(share * len(every)) - len(chosen))]
    return [every[index] for index in sorted(chosen)]


def share_on(
    rank: RankWorld, samples: Iterable[Sample], kinds: Callable[[Sample], Iterable[Hashable]]
) -> Sequence[Sample]:
    """Return the samples for which the profile of a rank has time; all if that is not limited."""
    if rank.sweep_share == 1.0:
        return list(samples)
    return share_of(samples, kinds, share=rank.sweep_share, seed=rank.config.seed)


def draw_of(rank: RankWorld, more: Callable[[Options], Iterable[Hashable]] = lambda _row: ()) -> Draw | None:
    """Return the function that draws rows of options, with each value of each; None if all are tried.

    `more` gives further kinds of rows, of each of which there is one.
    """
    if rank.sweep_share == 1.0:
        return None
    kinds = partial(_kinds_of, more=more)
    return partial(share_of, kinds=kinds, share=rank.sweep_share, seed=rank.config.seed)


def _kinds_of(row: Options, *, more: Callable[[Options], Iterable[Hashable]]) -> Iterable[Hashable]:
    return [*(f"{option}={value}" for option, value in row.items()), *more(row)]
