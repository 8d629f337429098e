"""Sweep of options by a covering array: any few of them together, except those that refuse each other.

A row is an interface called with a value of each option. One that is refused or wrong is narrowed down to the smallest
set of options that ends so, which names the outcome: `mesh=N x 1, reshard_after_forward=2`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from conformance.covering_arrays.combinations import Rule
from conformance.covering_arrays.covering import covering_rows
from conformance.sweeps.trials import End, Ended, Swept

Options = Mapping[str, Any]
"""Values of options by name."""
Axes = Mapping[str, Sequence[Any]]
"""Values of each option; the first is the default."""

Draw = Callable[[Sequence[Options]], Sequence[Options]]
"""Function that draws some of the rows, the same on all ranks."""

NO_OPTION = "no option"
"""Subject of a row in which all options have their defaults."""
_MAX_WRONG = 3
"""Number of wrong rows with which a share of them ends, since each further one would take long to be narrowed down."""
_MAX_RULE = 6
"""Number of options of a subset that rows can be made without; with more it counts as tried."""


@dataclass
class CoveringSweep:
    """Rows of a covering array that all ranks try; a refused or wrong row is narrowed down and excluded from new rows.

    A row with two options that refuse each other proves nothing about the rest: new rows try those.
    """

    options: Axes
    """Values of each option; the first is the default."""
    ended: Callable[[Options], Ended]
    """Function that tries a row on all ranks; a collective."""
    name: str = ""
    """Name of the interface, which precedes the options of an outcome; empty if the law has no other."""
    strength: int = 3
    """Number of options of which all values are tried together."""
    rules: Sequence[Rule] = ()
    """Combinations that no row has, since the interface gives them no meaning; the defaults keep them."""
    suspects: Sequence[Options] = ()
    """Options that fail in some version of torch: tried first, since narrowing a row down takes long."""
    refusals: Sequence[Options] | None = None
    """Options that may be refused together; any if None. Another refusal is a fault, see `Ended.judged`."""
    known: Sequence[Options] = ()
    """Options that earlier sweeps have found: a row that fails is narrowed down to these first."""
    label: str = "options"
    """Word for the rows in outcomes, where the interface has no name."""
    draw: Draw | None = None
    """Function that draws the rows to try, up to `_MAX_WRONG`; without it all are tried, suspects first."""
    _right: list[Options] = field(default_factory=list)
    _excluded: list[Options] = field(default_factory=list)
    _swept: Swept = field(default_factory=Swept)

    @property
    def defaults(self) -> Options:
        """Default of each option."""
        return {option: values[0] for option, values in self.options.items()}

    def swept(self, subjects: Collection[str] = ()) -> Swept:
        """Return the outcome: the number of right rows, and the refused and wrong subsets.

        Subjects that spell options restrict the rows to these and the defaults.
        """
        if chosen := named(subjects, self.options, self.name):
            for subset in ({}, *chosen):
                self._judge(subset, self._ended(subset))
        else:
            self._try_all()
        if self._right or all(self._excluded) or not self.name:  # else its defaults are refused or wrong, by a name
            self._swept.computed[self.name or self.label] = len(self._right)
        return self._swept

    def _try_all(self) -> None:
        if self.draw is not None:
            failing = [*self.suspects, *self.known]
            self._excluded += filter(None, failing)
            if {} in failing:
                self._judge({}, self._ended({}))
            self._try_rows(self.draw(self._missing()))
            return
        for subset in self.suspects:
            if not any(has({**self.defaults, **subset}, excluded) for excluded in self._excluded):
                self._judge(subset, self._ended(subset))
        while rows := self._missing():
            self._try_rows(rows)

    def _try_rows(self, rows: Iterable[Options]) -> None:
        for row in rows:
            # Outcomes are those of all ranks, so that all stop together.
            if self.draw is not None and self._swept.outcomes.get("wrong", 0) >= _MAX_WRONG:
                return
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
        found: list[list[dict[str, Any]]] = [[]]
        if dist.get_rank() == 0:  # all would find the same rows, and share the processors for it
            strength = min(self.strength, len(self.options))
            rules += self.rules
            found = [covering_rows(self.options, strength=strength, rules=rules, given=tried, rounds=0)]
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
        row = {**self.defaults, **subset}
        ended = ended.judged(may_refuse=self.refusals is None or any(has(row, refusal) for refusal in self.refusals))
        self._swept.count(ended.outcome)
        if ended.end is End.RIGHT:
            self._right.append(row)
            return
        self._excluded.append(subset)
        spelled = [_spelled(option, subset[option]) for option in self.options if option in subset]
        subject = ", ".join(spelled) or NO_OPTION
        self._swept.add_failure(f"{self.name}({subject})" if self.name else subject, ended, self.label)

    def _narrowed(self, row: Options, end: End | None) -> Options:
        """Return a smallest subset of a row that ends as the row does if all other options have their defaults.

        Options without which a subset would be right belong to it, in defaults as well: of those the row has its own
        values. Where ranks wait for each other, that takes too long.
        """
        for known in self.known:
            if has(row, known) and self._is_allowed(known) and self._ended(known).end is end:
                return known
        subset = {option: value for option, value in row.items() if value != self.defaults[option]}
        for option in list(subset):
            fewer = {other: value for other, value in subset.items() if other != option}
            if self._is_allowed(fewer) and self._ended(fewer).end is end:
                subset = fewer
        if end is None:
            return subset
        needed = {
            option: row[option]
            for option, (_, *others) in self.options.items()
            if option not in subset and any(self._is_right({**subset, option: value}) for value in others)
        }
        return {**subset, **needed}

    def _is_right(self, subset: Options) -> bool:
        return self._is_allowed(subset) and self._ended(subset).end is End.RIGHT

    def _is_allowed(self, subset: Options) -> bool:
        """Return whether rules allow a subset, and it has none that is excluded: that may fail for another reason."""
        row = {**self.defaults, **subset}
        is_excluded = any(has(row, excluded) for excluded in self._excluded)
        return not is_excluded and not any(rule.forbids(row) for rule in self.rules)

    def _ended(self, subset: Options) -> Ended:
        return self.ended({**self.defaults, **subset})


def named(subjects: Collection[str], options: Axes, name: str = "") -> list[Options]:
    """Return the subsets of options that subjects of an interface name, as they are reported.

    >>> named({"mean(dim=1)", "sum(dim=0)", "mean(no option)"}, {"dim": (0, 1)}, "mean")
    [{'dim': 1}, {}]
    """
    known = {_spelled(option, value): (option, value) for option, values in options.items() for value in values}
    own = [subject for subject in sorted(subjects) if not name or subject.startswith(f"{name}(")]
    bare = [subject.removeprefix(f"{name}(").removesuffix(")") if name else subject for subject in own]
    spelled = [[] if text == NO_OPTION else text.split(", ") for text in bare]
    return [dict(known[text] for text in each) for each in spelled if known.keys() >= {*each}]


def forbids(*axes: str, when: Callable[..., bool]) -> Rule:
    """Return a rule that forbids the values of axes for which a function of these values returns True."""
    return Rule(axes, partial(_is_forbidden, axes=axes, when=when))


def needs(axes: Axes, *conditions: tuple[Any, ...]) -> list[Rule]:
    """Return a rule for each condition `(option, other, *values)`.

    The option keeps its default unless the other one has one of the values.
    """
    return [
        Rule((option, other), partial(_lacks, option, axes[option][0], other, values))
        for option, other, *values in conditions
    ]


def _lacks(option: str, default: Any, other: str, values: Collection[Any], row: Options) -> bool:
    return row[option] != default and row[other] not in values


def _is_forbidden(row: Options, axes: tuple[str, ...], when: Callable[..., bool]) -> bool:
    return when(*(row[axis] for axis in axes))


def _spelled(option: str, value: Any) -> str:
    return f"{option}={value}"


def has(row: Options, subset: Options) -> bool:
    """Return whether a row has all values of a subset."""
    return all(row[option] == value for option, value in subset.items())
