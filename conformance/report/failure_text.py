"""Groups of failures in words, for a terminal and for markdown."""

import textwrap
from collections.abc import Iterator, Sequence

from conformance.judge.verdicts import Verdict
from conformance.report.failure_groups import OR, FailureGroup, broken_metric
from conformance.report.ratio_names import common_ratio
from conformance.report.schema import CaseResult
from conformance.report.smallest import smallest_text
from conformance.report.wording import counted, derivation_text, terms_text, value_text

MAX_CAUSES = 10
"""Number of causes that are told in words; the HTML report has all groups."""
_MAX_REASON = 300
"""Length of a reason from which on it is shortened, since one may name every tensor of a model."""


def causes(groups: Sequence[FailureGroup]) -> list[list[FailureGroup]]:
    """Return the groups by cause, those of most cases first: a size that names ratios is one, whichever laws see it."""
    by_cause = [[group] for group in groups if not group.ratio_of]
    left = [group for group in groups if group.ratio_of]
    while left:
        names = dict.fromkeys(name for group in left for name in _names(group))
        cause = max(([group for group in left if name in _names(group)] for name in names), key=_case_count)
        by_cause.append(cause)
        told = set(map(id, cause))
        left = [group for group in left if id(group) not in told]
    return sorted(by_cause, key=lambda cause: (_is_drift(cause[0]), -_case_count(cause)))


def title(groups: Sequence[FailureGroup]) -> str:
    """Return the title of the section: `What failed`, or that nothing has but metrics that drifted."""
    return "What drifted from the baseline" if all(map(_is_drift, groups)) else "What failed"


def summary(groups: Sequence[FailureGroup]) -> str:
    """Return one line: how many cases of how many laws failed or drifted, and the ratio that most of them share."""
    drifted = [group for group in groups if _is_drift(group)]
    failed = [group for group in groups if not _is_drift(group)]
    if not failed:
        return _cases_text(drifted)
    also = f"; besides, {_cases_text(drifted)} drifted from the baseline" if drifted else ""
    return f"{_cases_text(failed)}{_common_ratio_text(failed)}{also}"


def reason_text(group: FailureGroup) -> str:
    """Return the reason of the first case in one line; a long one is shortened."""
    return textwrap.shorten(group.reason, _MAX_REASON, placeholder=" ... (see report.html)")


def details(cause: Sequence[FailureGroup]) -> Iterator[str]:
    """Yield lines about what is known besides the first reason: smallest cell, ratio, laws, axes, defects, bound."""
    group = cause[0]
    if group.smallest:
        yield smallest_text(group.smallest)
    worst = f"worst in {group.tensor}" if group.tensor else ""
    common = ", ".join(filter(None, [ratio_text(group.ratio, group.ratio_of), worst]))
    if common or len(group.cases) > 1:
        yield ": ".join(filter(None, [f"{counted(len(group.cases), 'case')} of {group.law}", common]))
    if len(cause) > 1:
        others = ", ".join(f"{counted(len(other.cases), 'case')} of {other.law}" for other in cause[1:])
        yield f"the same ratio in {others}"
    if group.shared:
        values = ", ".join(f"{axis} = {value}" for axis, value in group.shared.items())
        yield f"only where {values} (all that failed, none that passed)"
    if group.defects:
        yield f"known faults with this signature: {', '.join(group.defects)}"
    yield from _bound_lines(group.cases[0])


def commands(group: FailureGroup) -> Iterator[tuple[str, str]]:
    """Yield purpose and command: `repeat` for the first case and, if it was searched for, for the smallest cell."""
    yield "repeat", group.repro
    if group.smallest and group.smallest.cell != group.cases[0].cell:
        yield "repeat the smallest", group.smallest.repro


def ratio_text(ratio: float | None, ratio_of: str) -> str:
    """Return a clause about a ratio and its names: `measured is 2.000 times expected = dp_shard`; empty for neither."""
    if ratio is None:
        return f"measured is {ratio_of} times expected" if ratio_of else ""
    return f"measured is {ratio:#.4g} times expected{f' = {ratio_of}' if ratio_of else ''}"


def _names(group: FailureGroup) -> list[str]:
    return group.ratio_of.split(OR) if group.ratio_of else []


def _is_drift(group: FailureGroup) -> bool:
    return group.verdict == Verdict.QUALITY_WARNING


def _case_count(groups: Sequence[FailureGroup]) -> int:
    return sum(len(group.cases) for group in groups)


def _cases_text(groups: Sequence[FailureGroup]) -> str:
    laws = {case.law for group in groups for case in group.cases}
    return f"{counted(_case_count(groups), 'case')} of {counted(len(laws), 'law')}"


def _common_ratio_text(groups: Sequence[FailureGroup]) -> str:
    """Clause about the first cause, if several groups have its ratio."""
    cause = causes(groups)[0]
    if len(cause) == 1:
        return ""
    names = [name for name in _names(cause[0]) if all(name in _names(group) for group in cause)]
    number = "all" if len(cause) == len(groups) else str(_case_count(cause))
    return f"; in {number} of them {ratio_text(common_ratio([group.ratio for group in cause]), OR.join(names))}"


def _bound_lines(case: CaseResult) -> Iterator[str]:
    """Derivation of the bound that is broken, as far as the reason does not tell it already."""
    broken = broken_metric(case)
    if not broken or not broken[1].terms:
        return
    name, metric = broken
    if metric.formula in case.reason:
        yield f"terms of the bound: {terms_text(metric)}"
    else:
        yield f"{name}{f' at {metric.at}' if metric.at else ''}: {value_text(metric)}, {derivation_text(metric)}"
