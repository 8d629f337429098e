"""Rows of values of options, any few together: a refused or wrong row is narrowed down to the values that matter."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch.distributed as dist

from conformance.covering_arrays.combinations import Rule
from conformance.covering_arrays.covering import covering_rows
from conformance.experiments.context import RankWorld
from conformance.sweeps.trials import End, Ended, Swept, Wrong

Options = Mapping[str, Any]
"""Values of options by their names."""
Axes = Mapping[str, Sequence[Any]]
"""Values of each option; the first is the default."""

_MAX_RULE = 6
"""Number of options of a subset that rows can be made without; with more it counts as tried."""


class RowSweep:
    """Rows of a covering array that all ranks try; a refused or wrong row is narrowed down and excluded from new rows.

    A row with two options that refuse each other proves nothing about the rest: new rows try those. With `limit` the
    seed of the cell draws this many rows of the array without suspects, and no more are tried.
    """

    def __init__(
        self,
        rank: RankWorld,
        axes: Axes,
        ended: Callable[[Options], Ended],
        *,
        label: str,
        strength: int,
        suspects: Sequence[Options] = (),
        rules: Sequence[Rule] = (),
        limit: int | None = None,
    ) -> None:
        self._rank, self._axes, self._end_of = rank, axes, ended
        self._label, self._strength, self._suspects = label, strength, suspects
        self._rules, self._limit = list(rules), limit
        self._defaults: Options = {option: values[0] for option, values in axes.items()}
        self._right: list[Options] = []
        self._excluded: list[Options] = []
        self._swept = Swept()

    def swept(self) -> Swept:
        """Return the outcome: the number of right rows, and the refused and wrong subsets."""
        if subsets := _named(self._axes, self._rank.subjects):
            for subset in ({}, *subsets):
                self._judge(subset, self._ended(subset))
        else:
            self._try_all()
        self._swept.computed[self._label] = len(self._right)
        return self._swept

    def _try_all(self) -> None:
        if self._limit is not None:
            self._excluded += self._suspects
            rows = self._missing()
            self._try_rows(Random(self._rank.config.seed).sample(rows, min(self._limit, len(rows))))
            return
        for subset in self._suspects:
            if not any(has({**self._defaults, **subset}, excluded) for excluded in self._excluded):
                self._judge(subset, self._ended(subset))
        while rows := self._missing():
            self._try_rows(rows)

    def _try_rows(self, rows: Iterable[Options]) -> None:
        for row in rows:
            if not any(has(row, excluded) for excluded in self._excluded):
                self._try(row)

    def _missing(self) -> list[dict[str, Any]]:
        """Return rows with the combinations that no right row has; empty if the defaults themselves are wrong."""
        if not all(self._excluded):
            return []
        rules = [
            Rule(subset.keys(), partial(has, subset=subset)) for subset in self._excluded if len(subset) <= _MAX_RULE
        ]
        tried = [*self._right, *(subset for subset in self._excluded if len(subset) > _MAX_RULE)]
        rules += self._rules
        # On one rank: all would find the same rows, and share the processors for it.
        is_first = self._rank.rank == 0
        rows = (
            covering_rows(self._axes, strength=self._strength, rules=rules, given=tried, rounds=0) if is_first else []
        )
        found = [rows]
        dist.broadcast_object_list(found)
        return found[0]

    def _try(self, row: Options) -> None:
        ended = self._ended(row)
        if ended.end is not End.RIGHT:
            subset = self._narrowed(row, ended.end)
            narrowed = self._ended(subset)
            if narrowed.end is ended.end:
                row, ended = subset, narrowed
        self._judge(row, ended)

    def _judge(self, subset: Options, ended: Ended) -> None:
        """Record the outcome of a row, or of a subset of one."""
        self._swept.count(ended.outcome)
        if ended.end is End.RIGHT:
            self._right.append({**self._defaults, **subset})
            return
        self._excluded.append(subset)
        subject = ", ".join(_spelled(option, subset[option]) for option in self._axes if option in subset)
        subject = subject or "no option"
        if ended.end is End.ERROR:
            self._swept.computed[subject], self._swept.refused[subject] = 0, 1
            self._swept.reasons[subject] = f"{ended.error!r:.200}"
        for fault, text in ended.faults.items():
            self._swept.wrong.append(Wrong(subject=subject, fault=fault, kind=self._label, cases=1, example=text))

    def _narrowed(self, row: Options, end: End | None) -> Options:
        """Return a smallest subset of a row that ends as the row does if all other options have their defaults.

        Options without which a subset would be right belong to it, in defaults as well: of those the row has its own
        values. Where ranks wait for each other, that takes too long.
        """
        subset = {option: value for option, value in row.items() if value != self._defaults[option]}
        for option in list(subset):
            fewer = {other: value for other, value in subset.items() if other != option}
            if self._is_possible(fewer) and self._ended(fewer).end is end:
                subset = fewer
        if end is None:
            return subset
        needed = {
            option: row[option]
            for option, (_, *others) in self._axes.items()
            if option not in subset and any(self._is_right({**subset, option: value}) for value in others)
        }
        return {**subset, **needed}

    def _is_right(self, subset: Options) -> bool:
        return self._is_possible(subset) and self._ended(subset).end is End.RIGHT

    def _is_possible(self, subset: Options) -> bool:
        return not any(rule.forbids({**self._defaults, **subset}) for rule in self._rules)

    def _ended(self, subset: Options) -> Ended:
        return self._end_of({**self._defaults, **subset})


def forbidden(names: str, forbids: Callable[..., Any]) -> Rule:
    """Return the rule that forbids values of options; `names` are joined by ` & `, as `forbids` takes their values."""
    options = names.split(" & ")
    return Rule(options, lambda row: bool(forbids(*(row[option] for option in options))))


def has(row: Options, subset: Options) -> bool:
    """Return whether a row has all values of a subset."""
    return all(row[option] == value for option, value in subset.items())


def refuses(row: Options, refusals: Sequence[Options]) -> bool:
    """Return whether a row has all values of one of these subsets."""
    return any(has(row, subset) for subset in refusals)


def _spelled(option: str, value: Any) -> str:
    return f"{option}={value}"


def _named(axes: Axes, subjects: Iterable[str]) -> list[Options]:
    """Return the options of each subject that names some; subjects of other sweeps are left out."""
    options = {_spelled(option, value): (option, value) for option, values in axes.items() for value in values}
    spelled = [subject.split(", ") for subject in sorted(subjects)]
    return [dict(options[text] for text in each) for each in spelled if options.keys() >= set(each)]
