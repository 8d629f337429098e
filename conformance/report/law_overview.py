"""Overview of laws: by family, with verdicts and the narrowest margin to a bound."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from conformance.judge.margins import margin_of
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.scopes import in_order
from conformance.report.schema import CaseResult
from conformance.report.wording import is_outside

NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.NOT_RUN})
"""Verdicts that say nothing about the law."""
_TOLD_RATIO = 1.01


class Narrowest(msgspec.Struct, frozen=True):
    """Metric of a law with the least room to its bound, over all cases."""

    text: str
    """Room of the metric, such as `43 % of the bound`; `exact` if the law leaves no room, empty without bounds."""
    metric: str = ""
    """Name of the metric, and where it was worst."""
    case: str = ""
    """Id of the case with that metric; empty for `exact`."""


class LawOverview(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts on one law."""

    id: str
    must: str
    cases: list[CaseResult]
    verdicts: dict[str, int]
    """Number of cases by verdict, in the order of `Verdict`."""
    narrowest: Narrowest

    @property
    def is_bad(self) -> bool:
        """True if any case speaks against conformance."""
        return any(case.verdict in BAD for case in self.cases)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Laws whose ids begin alike."""

    name: str
    laws: list[LawOverview]
    verdicts: dict[str, int]
    duration_s: float
    """Duration of all cases, one after the other."""


def families_of(cases: Sequence[CaseResult]) -> list[Family]:
    """Return the overview of all laws of a report by family, in the order of ids."""
    ordered = sorted(cases, key=lambda case: in_order(case.law))
    return [_family(name, list(group)) for name, group in groupby(ordered, key=lambda case: case.law.partition("-")[0])]


def verdict_counts(cases: Sequence[CaseResult]) -> dict[str, int]:
    """Return the number of cases by verdict, in the order of `Verdict`, without those of which there is none."""
    counts = Counter(case.verdict for case in cases)
    return {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}


def narrowest_margin(cases: Sequence[CaseResult]) -> Narrowest:
    """Return the metric with the least room to its bound."""
    bounded = [(margin_of(metric), name, metric, case) for case in cases for name, metric in _bounded(case)]
    with_room = [entry for entry in bounded if entry[2].lower != entry[2].upper or entry[0] > 1.0]
    if not with_room:
        return Narrowest("exact" if bounded else "")
    margin, name, metric, case = max(with_room, key=lambda entry: entry[0])
    return Narrowest(_room(margin, metric), f"{name}{f' at {metric.at}' if metric.at else ''}", case.id)


def _family(name: str, cases: list[CaseResult]) -> Family:
    return Family(
        name=name,
        laws=[_law(list(group)) for _, group in groupby(cases, key=lambda case: case.law)],
        verdicts=verdict_counts(cases),
        duration_s=sum(case.duration_s for case in cases),
    )


def _law(cases: list[CaseResult]) -> LawOverview:
    return LawOverview(
        id=cases[0].law,
        must=cases[0].must,
        cases=cases,
        verdicts=verdict_counts(cases),
        narrowest=narrowest_margin(cases),
    )


def _bounded(case: CaseResult) -> Iterator[tuple[str, Measurement]]:
    for name, metric in case.measured.items():
        if metric.lower is not None or metric.upper is not None:
            yield name, metric


def _room(margin: float, metric: Measurement) -> str:
    """Room of a metric in words; a memory between two bounds is a distance, since a bound of 0 % is no model's."""
    value, lower, upper = metric.value, metric.lower, metric.upper
    if is_outside(metric):
        return "outside" if math.isinf(margin) or margin < _TOLD_RATIO else f"{margin:.3g} times the bound"
    if metric.kind == "memory" and value is not None and lower and upper is not None:
        is_low = value - lower <= upper - value
        distance, side = (value - lower, "above the lower") if is_low else (upper - value, "below the upper")
        return f"{distance:.0f} bytes {side} bound"
    return f"{100 * margin:.2g} % of the bound"
