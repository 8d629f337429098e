"""Failures of a session, grouped by cause: law, tensor, and the factor by which the measured is off."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import msgspec

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.cells import cell_from_id
from conformance.plan.mesh import AxisError
from conformance.plan.selection import Facts
from conformance.report.matching_defects import MatchingDefects
from conformance.report.ratio_names import are_equal, common_ratio, fitting_names, plausible_names
from conformance.report.schema import CaseResult, Report
from conformance.report.shared_axes import features, shared_values
from conformance.report.smallest import Smallest
from conformance.report.wording import is_outside

OR = " or "
"""Separator of the names of a ratio."""
_PASSED = (Verdict.PASS, Verdict.QUALITY_WARNING)
_TENSOR = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that fail for the same cause, as far as their metrics and reasons tell."""

    verdict: str
    law: str
    """Id of the law; ids with commas if a run that did not finish, or the suite itself, failed several."""
    must: str
    """Statement of the law of the first case."""
    cases: list[CaseResult]
    """All cases of the group, the one on the simplest cell first."""
    tensor: str
    """Pattern of the tensors that are worst, such as `layers.*.attention.wq.weight`; empty if there is none."""
    ratio: float | None
    """Factor by which what was measured is a multiple of what was expected, if it is the same in all cases."""
    ratio_of: str
    """Sizes that this factor equals in every case, joined by `or`: `dp_shard`, `1/dp`, `sqrt(tp)`; empty if none."""
    shared: dict[str, str]
    """Axis values that all failing cells have, and none on which the law passes; see `shared_axes`."""
    defects: list[str]
    """Ids of known faults with the same signature; see `matching_defects`."""
    reason: str
    """Reason of the first case."""
    repro: str
    """Command that repeats the first case."""
    smallest: Smallest | None
    """Smallest cell on which the law fails alike, if it was searched for."""


def failure_groups(report: Report) -> list[FailureGroup]:
    """Return the groups of all cases that failed or drifted: the largest first, drifted ones last.

    Cases that are waived, unsupported or not run have not failed.
    """
    facts = _facts_of(report.cases)
    failed = [case for case in report.cases if case.verdict in (*BAD, Verdict.QUALITY_WARNING)]
    if not failed:
        return []
    passing: dict[str, list[Facts]] = defaultdict(list)
    for case in report.cases:
        if case.verdict in _PASSED and case.cell in facts:
            passing[case.law].append(facts[case.cell])
    matching = MatchingDefects(report.cases, facts)
    smallest = {found.case: found for found in report.smallest}
    groups = [_group(cases, facts, passing, matching, smallest) for cases in _by_cause(failed, facts)]
    return sorted(groups, key=lambda group: (group.verdict == Verdict.QUALITY_WARNING, -len(group.cases)))


def broken_metric(case: CaseResult) -> tuple[str, Measurement] | None:
    """Return name and metric that violates its bounds, the last if there are several; None if there is none.

    Laws end at their first comparison that fails.
    """
    return next((item for item in reversed(case.measured.items()) if is_outside(item[1])), None)


def _facts_of(cases: Sequence[CaseResult]) -> dict[str, Facts]:
    """Facts of all cells whose ids this version of the suite can read, by id."""
    facts: dict[str, Facts] = {}
    for cell in dict.fromkeys(case.cell for case in cases):
        try:
            facts[cell] = cell_from_id(cell).facts()
        except AxisError:
            continue
    return facts


def _by_cause(cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> Iterator[list[CaseResult]]:
    """Yield the cases of each group."""
    for of_law in _by_key([case for case in cases if _ratio(case) is not None], lambda case: (case.verdict, case.law)):
        yield from _by_ratio(of_law, facts)
    yield from _by_key([case for case in cases if _ratio(case) is None], _cause)


def _by_key(cases: Sequence[CaseResult], key: Callable[[CaseResult], Hashable]) -> list[list[CaseResult]]:
    groups: dict[Hashable, list[CaseResult]] = defaultdict(list)
    for case in cases:
        groups[key(case)].append(case)
    return list(groups.values())


def _cause(case: CaseResult) -> tuple[str, ...]:
    """Key of the cause of a failure by other than its ratio.

    A run that did not finish fails all laws on its cell for the same reason, in which the rank and other numbers may
    differ; the reason of an unexpected pass has the number of an issue.
    """
    if case.verdict == Verdict.QUALITY_WARNING or broken_metric(case):
        return case.verdict, case.law, _tensor(case)
    is_waived = case.verdict == Verdict.UNEXPECTED_PASS
    return case.verdict, case.reason if is_waived else re.sub(r"\d+", "#", case.reason)


def _by_ratio(cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> Iterator[list[CaseResult]]:
    """Yield groups whose ratios are the same size or number, the largest first, and then the cases that are left."""
    left = list(cases)
    while left:
        explained = max(_explained(left, facts), key=len)
        if len(explained) <= 1:
            yield from _by_key(left, _cause)
            return
        yield explained
        told = {case.id for case in explained}
        left = [case for case in left if case.id not in told]


def _explained(cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> Iterator[list[CaseResult]]:
    """Yield the cases that each size, and then each number, explains as their ratio."""
    names = [_names(case, facts) for case in cases]
    for name in dict.fromkeys(itertools.chain(*names)):
        yield [case for case, fitting in zip(cases, names, strict=True) if name in fitting]
    ratios = [ratio for case in cases if (ratio := _ratio(case)) is not None]
    for number in dict.fromkeys(ratios):
        yield [case for case, ratio in zip(cases, ratios, strict=True) if are_equal(ratio, number)]


def _group(
    cases: Sequence[CaseResult],
    facts: Mapping[str, Facts],
    passing: Mapping[str, Sequence[Facts]],
    matching: MatchingDefects,
    smallest: Mapping[str, Smallest],
) -> FailureGroup:
    ordered = sorted(cases, key=lambda case: _complexity(case, facts))
    laws = list(dict.fromkeys(case.law for case in cases))
    passed = [passed for law in laws for passed in passing.get(law, ())]
    first = ordered[0]
    return FailureGroup(
        verdict=first.verdict,
        law=", ".join(laws),
        must=first.must,
        cases=ordered,
        tensor=_common_pattern([_tensor(case) for case in ordered]),
        ratio=common_ratio([_ratio(case) for case in ordered]),
        ratio_of=OR.join(plausible_names(_common_names(ordered, facts), passed)),
        shared=shared_values([facts[case.cell] for case in cases if case.cell in facts], passed),
        defects=matching.of(cases),
        reason=first.reason,
        repro=first.repro,
        smallest=next((smallest[case.id] for case in cases if case.id in smallest), None),
    )


def _complexity(case: CaseResult, facts: Mapping[str, Facts]) -> tuple[bool, int, int]:
    """Key to sort cases by: number of features of the cell, then number of ranks; unknown cells last."""
    if case.cell not in facts:
        return True, 0, 0
    return False, features(facts[case.cell]), int(facts[case.cell]["world"])


def _ratio(case: CaseResult) -> float | None:
    broken = broken_metric(case)
    return broken[1].ratio if broken else None


def _names(case: CaseResult, facts: Mapping[str, Facts]) -> list[str]:
    ratio = _ratio(case)
    return fitting_names(ratio, facts[case.cell]) if ratio is not None and case.cell in facts else []


def _common_names(cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> list[str]:
    fitting = [_names(case, facts) for case in cases]
    return [name for name in fitting[0] if all(name in names for names in fitting)]


def _tensor(case: CaseResult) -> str:
    """Name of the tensor that is worst, with `*` for numbers of layers; empty if the metric is of no tensor."""
    broken = broken_metric(case)
    if not broken or not _TENSOR.fullmatch(broken[1].at):
        return ""
    return ".".join("*" if word.isdigit() else word for word in broken[1].at.split("."))


def _common_pattern(patterns: Sequence[str]) -> str:
    """Return the pattern that all match, with `*` for the words that differ; empty if nothing else is left."""
    split = [pattern.split(".") for pattern in patterns]
    if len({len(words) for words in split}) > 1:
        return ""
    common = [words[0] if len(set(words)) == 1 else "*" for words in zip(*split, strict=True)]
    return ".".join(common) if set(common) != {"*"} else ""
