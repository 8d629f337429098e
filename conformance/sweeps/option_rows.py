"""Rows of options, any few together: a covering array that all ranks try, and the smallest subset of a wrong row."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from conformance.covering_arrays.combinations import Rule
from conformance.covering_arrays.covering import covering_rows
from conformance.sweeps.trials import REFUSAL, End, Ended, Swept, Wrong

Options = Mapping[str, Any]
"""Values of options by name."""

_MAX_RULE = 6
"""Number of options of a subset that rows can be made without; with more it counts as tried."""


class RowSweep:
    """Rows of a covering array that all ranks try; a refused or wrong row is narrowed down and excluded from new rows.

    A row with two options that refuse each other proves nothing about the rest: new rows try those.

    Args:
        options: Values of each option; the first is the default.
        ended: Function that tries a row with a value of each option, and returns its end.
        rank: Number of this rank.
        named: Subjects to which sweeps are restricted; those of other sweeps are left out.
        suspects: Values of some options that fail in some version, tried first, since narrowing a row down takes long.
        strength: Number of options of which any values are tried together.
        rules: Values that no row may have together.
        refusals: Values that may be refused together; any if None. Another refusal is a fault, since documented options
            must not raise on all ranks.
    """

    def __init__(
        self,
        options: Mapping[str, Sequence[Any]],
        ended: Callable[[Options], Ended],
        *,
        rank: int,
        named: Iterable[str],
        suspects: Iterable[Options],
        strength: int,
        rules: Iterable[Rule] = (),
        refusals: Sequence[Options] | None = None,
    ) -> None:
        self._options, self._ends, self._rank = options, ended, rank
        self._defaults = {option: values[0] for option, values in options.items()}
        self._named, self._suspects = self._read(named), suspects
        self._strength, self._rules, self._refusals = strength, list(rules), refusals
        self._right: list[Options] = []
        self._excluded: list[Options] = []
        self._swept = Swept()

    def swept(self) -> Swept:
        """Return the outcome: the number of right rows, and the refused and wrong subsets."""
        if self._named:
            for subset in ({}, *self._named):
                self._judge(subset, self._ended(subset))
        else:
            self._try_all()
        self._swept.computed["options"] = len(self._right)
        return self._swept

    def _try_all(self) -> None:
        for subset in self._suspects:
            if not any(_has({**self._defaults, **subset}, excluded) for excluded in self._excluded):
                self._judge(subset, self._ended(subset))
        while rows := self._missing():
            for row in rows:
                if not any(_has(row, excluded) for excluded in self._excluded):
                    self._try(row)

    def _missing(self) -> list[dict[str, Any]]:
        """Return rows with the combinations that no right row has; empty if the defaults themselves are wrong."""
        if not all(self._excluded):
            return []
        rules = [
            Rule(subset.keys(), partial(_has, subset=subset)) for subset in self._excluded if len(subset) <= _MAX_RULE
        ]
        tried = [*self._right, *(subset for subset in self._excluded if len(subset) > _MAX_RULE)]
        # On one rank: all would find the same rows, and share the processors for it.
        found = [self._covering(rules, tried) if self._rank == 0 else []]
        dist.broadcast_object_list(found)
        return found[0]

    def _covering(self, rules: list[Rule], tried: list[Options]) -> list[dict[str, Any]]:
        return covering_rows(
            self._options, strength=self._strength, rules=[*self._rules, *rules], given=tried, rounds=0
        )

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
        row = {**self._defaults, **subset}
        if ended.end is End.RIGHT:
            self._swept.count(ended.outcome)
            self._right.append(row)
            return
        self._excluded.append(subset)
        spelled = (_spelled(option, subset[option]) for option in self._options if option in subset)
        subject, faults = ", ".join(spelled) or "no option", dict(ended.faults)
        if ended.end is End.ERROR and self._may_refuse(row):
            self._swept.computed[subject], self._swept.refused[subject] = 0, 1
            self._swept.reasons[subject] = f"{ended.error!r:.200}"
        elif ended.end is End.ERROR:
            faults = {REFUSAL: f"{ended.error!r:.200}"}
        self._swept.count("wrong" if faults else ended.outcome)
        for fault, text in faults.items():
            self._swept.wrong.append(Wrong(subject=subject, fault=fault, kind="options", cases=1, example=text))

    def _may_refuse(self, row: Options) -> bool:
        return self._refusals is None or any(_has(row, refusal) for refusal in self._refusals)

    def _narrowed(self, row: Options, end: End | None) -> Options:
        """Return a smallest subset of a row that ends as the row does if all other options have their defaults.

        Options without which a subset would be right belong to it, in defaults as well: of those the row has its own
        values. Where ranks wait for each other, that takes too long.
        """
        subset = {option: value for option, value in row.items() if value != self._defaults[option]}
        for option in list(subset):
            fewer = {other: value for other, value in subset.items() if other != option}
            if self._is_new(fewer) and self._ended(fewer).end is end:
                subset = fewer
        if end is None:
            return subset
        needed = {
            option: row[option]
            for option, (_, *others) in self._options.items()
            if option not in subset and any(self._is_right({**subset, option: value}) for value in others)
        }
        return {**subset, **needed}

    def _is_right(self, subset: Options) -> bool:
        return self._is_new(subset) and self._ended(subset).end is End.RIGHT

    def _is_new(self, subset: Options) -> bool:
        """Return whether rules allow a subset, and it has none that is excluded: that may fail for another reason."""
        row = {**self._defaults, **subset}
        is_excluded = any(_has(row, excluded) for excluded in self._excluded)
        return not is_excluded and not any(rule.forbids(row) for rule in self._rules)

    def _ended(self, subset: Options) -> Ended:
        return self._ends({**self._defaults, **subset})

    def _read(self, subjects: Iterable[str]) -> list[Options]:
        """Return the options of each subject that names some; subjects of other sweeps are left out."""
        named = {
            _spelled(option, value): (option, value) for option, values in self._options.items() for value in values
        }
        spelled = [subject.split(", ") for subject in sorted(subjects)]
        return [dict(named[text] for text in each) for each in spelled if named.keys() >= set(each)]


def _spelled(option: str, value: Any) -> str:
    return f"{option}={value}"


def _has(row: Options, subset: Options) -> bool:
    return all(row[option] == value for option, value in subset.items())
