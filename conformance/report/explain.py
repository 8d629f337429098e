"""Explanation of the failures of a session: causes, each with the cases that it explains.

`explain` is the one entry: texts, HTML, annotations and the search for smallest cells all render its result. A cause
is a ratio by which results are off, if a size of the mesh explains it, whichever laws see it; otherwise the tensor that
is worst in the cases of a law, or the reason of a run that did not finish. Causes with the same first wrong place are
told together.
"""

import itertools
import re
import textwrap
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from conformance.defects.catalogue import Signature, signatures
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.cells import Cell, axis_names, cell_from_id
from conformance.plan.mesh import AxisError
from conformance.plan.selection import Facts, parse
from conformance.report.causes import Cause, in_causal_order
from conformance.report.location import Location
from conformance.report.ratios import MESH_SIZES, RATIO_SPREAD, are_equal, common_ratio, plausible_names, ratio_names
from conformance.report.schema import CaseResult, Report, Smallest
from conformance.report.wording import counted, derivation_text, is_outside, spelled, terms_text, value_text

T = TypeVar("T")
MAX_EXPLANATIONS = 10
"""Number of causes that texts show; report.html has all."""
_MAX_REASON = 300
"""Longest reason that is shown in full: a reason may name every tensor of a model."""
_MAX_DEFECTS = 5
"""Number of known faults that are named: a failure that fits more of them is explained by none."""
_PASSED = (Verdict.PASS, Verdict.QUALITY_WARNING)
_JUDGED = (*_PASSED, Verdict.FAIL, Verdict.TIMEOUT)
_TENSOR = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_DEFAULTS = Cell().facts()


class Explanation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One cause, and the cases that fail for it by their metrics and reasons."""

    cases: list[CaseResult]
    """All cases of the law with this cause, the one on the simplest cell first."""
    law: str
    """Id of the law; ids with commas if a run that did not finish, or the suite itself, failed several."""
    tensor: str
    """Pattern of the tensors that are worst, such as `layers.*.attention.wq.weight`; empty if there is none."""
    ratio: float | None
    """Factor by which the measured values are a multiple of the expected ones, if it is the same in all cases."""
    ratio_names: list[str]
    """Sizes that this factor equals in every case: `dp_shard`, `1/dp`, `sqrt(tp)`."""
    shared: dict[str, str]
    """Axis values of all failing cells, and of no cell on which the law passes, as a selection spells them.

    Empty where no cell passes. Sizes of the mesh, `2 or 4`, if no axis differs.
    """
    defects: list[str]
    """Ids of at most five known faults with the same signature: their laws fail, and none passes, where they must."""
    smallest: Smallest | None
    """Smallest cell on which the law fails in the same way, if it was searched for."""
    location: Location | None = None
    """First wrong place, if it was found; None in `same_place`, where it would be told again."""
    related: "list[Explanation]" = []
    """Explanations of further laws in which results are off by the same size."""
    same_place: "list[Explanation]" = []
    """Further explanations with the same first wrong place."""
    cause: Cause | None = None
    """First cause, for another trainer: `cases` are those of all laws that fail because of it."""

    @property
    def first(self) -> CaseResult:
        """Case on the simplest cell, which stands for all."""
        return self.cases[0]

    @property
    def with_related(self) -> "list[Explanation]":
        """This explanation, the related ones, and all with the same first wrong place."""
        others = (*self.related, *self.same_place)
        return [self, *(each for other in others for each in other.with_related)]

    @property
    def all_cases(self) -> list[CaseResult]:
        """Cases, those of related explanations included."""
        return [case for each in self.with_related for case in each.cases]

    @property
    def case_count(self) -> int:
        """Number of cases, those of related explanations included."""
        return len(self.all_cases)

    @property
    def shared_ratio(self) -> str:
        """Clause about the ratio of this explanation and the related ones; empty without one."""
        group = [self, *self.related]
        return _ratio_text(common_ratio([each.ratio for each in group]), _common([each.ratio_names for each in group]))

    @property
    def is_drift(self) -> bool:
        """True if the law holds, and only metrics have drifted from the baseline."""
        return self.first.verdict == Verdict.QUALITY_WARNING

    @property
    def short_reason(self) -> str:
        """Cause, or reason of the first case, in one line, shortened if it is long."""
        reason = self.cause.sentence if self.cause else self.first.reason
        return textwrap.shorten(reason, _MAX_REASON, placeholder=" ... (see report.html)")

    @property
    def details(self) -> list[str]:
        """Lines that say more than the reason: first wrong place, smallest cell, ratio, laws, axes, defects, bound."""
        return list(_details(self))

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Purpose and command: `repeat` for the first case and, if it was searched for, for the smallest cell."""
        commands = [("repeat", self.first.repro)]
        if self.smallest and self.smallest.cell != self.first.cell:
            commands.append(("repeat the smallest", self.smallest.repro))
        return commands


def explain(report: Report) -> list[Explanation]:
    """Return the causes of all failures and drifts of a report: those of most cases first, drifts last.

    Cases that are waived, unsupported or not run have not failed.
    """
    if not any(_has_failed(case) for case in report.cases):
        return []
    if report.trainer is not None:
        return list(_for_trainer(report))
    return _by_law(report)


def _for_trainer(report: Report) -> Iterator[Explanation]:
    """Yield the causes of failures of another trainer, and the failures on each cell of which no cause is known."""
    causes = {cell: cause for cause in report.causes for cell in cause.cells}
    failed = [case for case in report.cases if case.verdict in BAD]
    locations = {found.cell: found for found in report.locations}
    groups = _by_key(failed, lambda case: causes[case.cell].cells[0] if case.cell in causes else case.cell)
    for group in sorted(groups, key=lambda group: -len({case.cell for case in group})):
        cause = causes.get(group[0].cell)
        cells = cause.cells if cause else [group[0].cell]
        ordered = [case for cell in cells for case in in_causal_order(case for case in group if case.cell == cell)]
        yield Explanation(
            cases=ordered,
            law=ordered[0].law,
            tensor="",
            ratio=None,
            ratio_names=[],
            shared={},
            defects=[],
            smallest=None,
            location=next((locations[cell] for cell in cells if cell in locations), None),
            cause=cause,
        )
    drifted = [case for case in report.cases if case.verdict not in BAD]
    yield from _by_law(replace(report, cases=drifted)) if any(map(_has_failed, drifted)) else ()


def _by_law(report: Report) -> list[Explanation]:
    """Return the causes of the failures of the reference trainer's laws, or drifts."""
    facts = _known_facts(report.cases)
    failures = [_Failure(case, facts.get(case.cell)) for case in report.cases if _has_failed(case)]
    passing: dict[str, list[Facts]] = defaultdict(list)
    for case in report.cases:
        if case.verdict in _PASSED and case.cell in facts:
            passing[case.law].append(facts[case.cell])
    faults = _known_faults(report.cases, facts)
    smallest = {found.case: found for found in report.smallest}
    locations = {found.case: found for found in report.locations}
    explanations = [_explanation(group, passing, faults, smallest, locations) for group in _by_cause(failures)]
    joined = _joined_by_ratio(sorted(explanations, key=_drifts_last))
    return sorted(_joined_by_place(sorted(joined, key=_drifts_last)), key=_drifts_last)


def title(explanations: Sequence[Explanation]) -> str:
    """Return the title of the section: `What failed`, or that metrics have drifted and nothing failed."""
    only_drifts = explanations and all(each.is_drift for each in explanations)
    return "What drifted from the baseline" if only_drifts else "What failed"


def summary(explanations: Sequence[Explanation]) -> str:
    """Return one line: how many cases of how many laws failed or drifted, and the ratio or place that most share."""
    failed = [each for each in explanations if not each.is_drift]
    drifted = _cases_text([each for each in explanations if each.is_drift])
    if not failed:
        return drifted
    causes = sum(each.cause is not None for each in failed)
    told = f"{counted(causes, 'first cause')} of " if causes == len(failed) else ""
    also = f"; besides, {drifted} drifted from the baseline" if len(failed) < len(explanations) else ""
    return f"{told}{_cases_text(failed)}{_common_ratio_text(failed)}{_common_place_text(failed)}{also}"


def smallest_text(smallest: Smallest) -> str:
    """Return one line: the cell, the features with which the law fails, and that it passes without."""
    clauses = [f"smallest failing cell: {smallest.cell}: {_fails_with(smallest)}"]
    if smallest.bound:
        clauses.append(f"no case of {smallest.law} can do without {_joined(smallest.bound)}")
    if not smallest.complete:
        clauses.append("the search ended early, not all of it may be needed")
    return "; ".join(clauses)


# Groups of failures


class _Failure:
    """Case that failed, with the metric that shows it."""

    def __init__(self, case: CaseResult, facts: Facts | None) -> None:
        """`facts` are those of the cell; None if this version of the suite cannot read its id."""
        self.case, self.facts = case, facts
        self.broken = _broken_metric(case)
        self.ratio = self.broken[1].ratio if self.broken else None

    @cached_property
    def ratio_names(self) -> list[str]:
        """Names of the sizes that the ratio equals."""
        return ratio_names(self.ratio, self.facts) if self.ratio is not None and self.facts else []

    @cached_property
    def tensor(self) -> str:
        """Name of the worst tensor, with `*` for numbers of layers; empty if the metric is of no tensor."""
        if not self.broken or not _TENSOR.fullmatch(self.broken[1].at):
            return ""
        return ".".join("*" if word.isdigit() else word for word in self.broken[1].at.split("."))

    @property
    def cause(self) -> tuple[str, ...]:
        """Key of the cause, where no ratio is.

        A run that did not finish fails all laws on its cell for the same reason, in which the rank and other numbers
        may differ; the reason of an unexpected pass has the number of an issue.
        """
        verdict, reason = self.case.verdict, self.case.reason
        if verdict == Verdict.QUALITY_WARNING or self.broken:
            return verdict, self.case.law, self.tensor
        return verdict, reason if verdict == Verdict.UNEXPECTED_PASS else re.sub(r"\d+", "#", reason)

    @property
    def complexity(self) -> tuple[bool, int, int]:
        """Key to sort by: number of features of the cell, then number of ranks; unknown cells last."""
        if self.facts is None:
            return True, 0, 0
        features = sum(self.facts[name] != _DEFAULTS[name] for name in axis_names())
        return False, features, int(self.facts["world"])


def _has_failed(case: CaseResult) -> bool:
    return case.verdict in BAD or case.verdict == Verdict.QUALITY_WARNING


def _broken_metric(case: CaseResult) -> tuple[str, Measurement] | None:
    """Return name and metric that violates its bounds; the last if there are several, since laws end at the first."""
    return next((item for item in reversed(case.measured.items()) if is_outside(item[1])), None)


def _known_facts(cases: Sequence[CaseResult]) -> dict[str, Facts]:
    """Return the facts of all cells whose ids this version of the suite can read, by id."""
    facts: dict[str, Facts] = {}
    for cell in dict.fromkeys(case.cell for case in cases):
        try:
            facts[cell] = cell_from_id(cell).facts()
        except AxisError:
            continue
    return facts


def _explanation(
    failures: Sequence[_Failure],
    passing: Mapping[str, Sequence[Facts]],
    faults: "Sequence[_KnownFault]",
    smallest: Mapping[str, Smallest],
    locations: Mapping[str, Location],
) -> Explanation:
    ordered = sorted(failures, key=lambda failure: failure.complexity)
    laws = list(dict.fromkeys(failure.case.law for failure in failures))
    passed = [facts for law in laws for facts in passing.get(law, ())]
    return Explanation(
        cases=[failure.case for failure in ordered],
        law=", ".join(laws),
        tensor=_common_pattern([failure.tensor for failure in ordered]),
        ratio=common_ratio([failure.ratio for failure in ordered]),
        ratio_names=plausible_names(_common([failure.ratio_names for failure in ordered]), passed),
        shared=_shared_values([failure.facts for failure in failures if failure.facts], passed),
        defects=_fitting_faults(faults, {failure.case.id for failure in failures}),
        smallest=next((smallest[failure.case.id] for failure in failures if failure.case.id in smallest), None),
        location=next((locations[failure.case.id] for failure in ordered if failure.case.id in locations), None),
    )


def _by_cause(failures: Sequence[_Failure]) -> Iterator[list[_Failure]]:
    multiples = [failure for failure in failures if failure.ratio is not None]
    for law_failures in _by_key(multiples, lambda failure: (failure.case.verdict, failure.case.law)):
        yield from _by_ratio(law_failures)
    yield from _by_key([failure for failure in failures if failure.ratio is None], lambda failure: failure.cause)


def _by_ratio(failures: list[_Failure]) -> Iterator[list[_Failure]]:
    """Yield groups whose ratios are the same size or number, the largest first, and then the remaining cases."""
    left = failures
    while left:
        group = _most_of_one_ratio(left)
        if len(group) <= 1:
            yield from _by_key(left, lambda failure: failure.cause)
            return
        yield group
        explained = set(group)
        left = [failure for failure in left if failure not in explained]


def _most_of_one_ratio(failures: Sequence[_Failure]) -> list[_Failure]:
    """Return the failures that one size explains as their ratio; those of one number if these are more."""
    by_name: dict[str, list[_Failure]] = defaultdict(list)
    for failure in failures:
        for name in failure.ratio_names:
            by_name[name].append(failure)
    ratios = [failure.ratio for failure in failures if failure.ratio is not None]
    ordered = sorted(ratios)

    def frequency(number: float) -> int:
        spread = RATIO_SPREAD * abs(number)
        return bisect_left(ordered, number + spread) - bisect_right(ordered, number - spread)

    number = max(ratios, key=frequency)
    numbered = [failure for failure, ratio in zip(failures, ratios, strict=True) if are_equal(ratio, number)]
    return max([*by_name.values(), numbered], key=len)


def _by_key(entries: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return list(groups.values())


def _joined_by_ratio(explanations: Sequence[Explanation]) -> Iterator[Explanation]:
    """Yield the explanations, those with a size in common as one, the largest such set first."""
    yield from (each for each in explanations if not each.ratio_names)
    left = [each for each in explanations if each.ratio_names]
    while left:
        by_name: dict[str, list[Explanation]] = defaultdict(list)
        for each in left:
            for name in each.ratio_names:
                by_name[name].append(each)
        first, *related = max(by_name.values(), key=lambda group: sum(each.case_count for each in group))
        yield replace(first, related=related)
        told = {first, *related}
        left = [each for each in left if each not in told]


def _joined_by_place(explanations: Sequence[Explanation]) -> Iterator[Explanation]:
    """Yield the explanations, those with the same first wrong place as one."""
    for first, *others in _by_key(explanations, _place_or_itself):
        yield replace(first, same_place=[replace(each, location=None) for each in others]) if others else first


def _place_or_itself(explanation: Explanation) -> Hashable:
    found = explanation.location
    return (found.stage, found.name, found.quantity, found.step) if found else explanation


def _drifts_last(explanation: Explanation) -> tuple[bool, int]:
    return explanation.is_drift, -explanation.case_count


def _common_pattern(patterns: Sequence[str]) -> str:
    """Return the pattern that all match, with `*` for the words that differ; empty if nothing else is left."""
    split = [pattern.split(".") for pattern in patterns]
    if len({len(words) for words in split}) > 1:
        return ""
    common = [words[0] if len(set(words)) == 1 else "*" for words in zip(*split, strict=True)]
    return ".".join(common) if set(common) != {"*"} else ""


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the words of the first list that all others have."""
    return [word for word in lists[0] if all(word in words for words in lists)]


# Axis values


def _shared_values(failing: Sequence[Facts], passing: Sequence[Facts]) -> dict[str, str]:
    """Return the values of `Explanation.shared`."""
    if not failing or not passing:
        return {}
    common = {name: failing[0][name] for name in axis_names() if len({facts[name] for facts in failing}) == 1}
    telling = {name: spelled(value) for name, value in common.items() if all(facts[name] != value for facts in passing)}
    return telling or _telling_size(failing, passing)


def _telling_size(failing: Sequence[Facts], passing: Sequence[Facts]) -> dict[str, str]:
    """Return the values of the first size of the mesh of which no passing cell has one."""
    for name in MESH_SIZES:
        values = {facts[name] for facts in failing}
        if not values & {facts[name] for facts in passing}:
            return {name: " or ".join(map(spelled, sorted(values)))}
    return {}


# Known faults


class _KnownFault(msgspec.Struct, frozen=True):
    """Defect of the catalogue that a report speaks for and not against.

    A law that the defect must break speaks for it by a failure on a cell that shows the defect, and against it if it
    passes on all of these. Laws that were not judged there do not count.
    """

    id: str
    cases: frozenset[str]
    """Ids of the failing cases that the defect explains."""
    is_confirmed: bool
    """True if all laws of the defect speak for it."""


def _known_faults(cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> list[_KnownFault]:
    """Return the defects that a report speaks for: the confirmed ones first, then those with most laws."""
    by_law: dict[str, list[CaseResult]] = defaultdict(list)
    for case in cases:
        if case.verdict in _JUDGED and case.cell in facts:
            by_law[case.law].append(case)
    explained = [(s, evidence) for s in signatures() if (evidence := _evidence(s, by_law, facts))]
    explained.sort(key=lambda match: (len(match[1]) < len(match[0].laws), -len(match[1])))
    return [
        _KnownFault(signature.id, frozenset(itertools.chain(*evidence)), len(evidence) == len(signature.laws))
        for signature, evidence in explained
    ]


def _evidence(
    signature: Signature, by_law: Mapping[str, Sequence[CaseResult]], facts: Mapping[str, Facts]
) -> list[list[str]]:
    """Return the ids of cases that fail as they must with a defect, for each judged law; empty if one is against it."""
    if not signature.cells:
        return []
    shows_defect = parse(signature.cells).predicate
    expected = Verdict.TIMEOUT if signature.hangs else Verdict.FAIL
    evidence = []
    for law in signature.laws:
        cases = [case for case in by_law.get(law, ()) if shows_defect(facts[case.cell])]
        failing = [case.id for case in cases if case.verdict == expected]
        if cases and not failing:
            return []
        if failing:
            evidence.append(failing)
    return evidence


def _fitting_faults(faults: Iterable[_KnownFault], cases: set[str]) -> list[str]:
    """Return the ids of faults that explain some of the cases; unconfirmed ones only if there are no others."""
    fitting = [fault for fault in faults if not cases.isdisjoint(fault.cases)]
    confirmed = [fault for fault in fitting if fault.is_confirmed]
    return [fault.id for fault in confirmed or fitting][:_MAX_DEFECTS]


# Words


def _details(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of `Explanation.details`."""
    if explanation.cause is not None:
        yield from _cause_lines(explanation, explanation.cause)
        return
    yield from _location_lines(explanation)
    if explanation.smallest:
        yield smallest_text(explanation.smallest)
    worst = f"worst in {explanation.tensor}" if explanation.tensor else ""
    common = ", ".join(filter(None, [_ratio_text(explanation.ratio, explanation.ratio_names), worst]))
    if common or len(explanation.cases) > 1:
        yield ": ".join(filter(None, [_cases_of_law(explanation), common]))
    if explanation.related:
        yield f"the same ratio in {', '.join(map(_cases_of_law, explanation.related))}"
    if explanation.shared:
        values = ", ".join(f"{axis} = {value}" for axis, value in explanation.shared.items())
        yield f"only where {values} (all that failed, none that passed)"
    if explanation.defects:
        yield f"known faults with this signature: {', '.join(explanation.defects)}"
    yield from _bound_lines(explanation.first)


def _cause_lines(explanation: Explanation, cause: Cause) -> Iterator[str]:
    """Yield the place of a cause, its cells, the first law that sees it and those that follow."""
    if cause.where:
        yield f"where: {cause.where}"
    yield f"on {cause.on}"
    if not cause.log and explanation.first.reason not in cause.sentence:
        reason = textwrap.shorten(explanation.first.reason, _MAX_REASON, placeholder=" ...")
        yield f"first seen by {explanation.first.law}: {reason}"
    if cause.consequences:
        yield cause.consequences
    if cause.log:
        yield f"output of all ranks: {cause.log}"


def _location_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the first wrong place, with its cell if that is not the first case's, and all others that have it."""
    found = explanation.location
    if found is not None:
        yield f"{found.sentence}{f'; seen on {found.cell}' if found.cell != explanation.first.cell else ''}"
    if explanation.same_place:
        others = [related for each in explanation.same_place for related in each.with_related]
        yield f"the same first wrong place in {', '.join(map(_cases_of_law, others))}"


def _bound_lines(case: CaseResult) -> Iterator[str]:
    """Yield the derivation of the broken bound, or the terms alone if the reason has the formula already."""
    broken = _broken_metric(case)
    if not broken or not broken[1].terms:
        return
    name, metric = broken
    if metric.formula in case.reason:
        yield f"terms of the bound: {terms_text(metric)}"
    else:
        yield f"{name}{f' at {metric.at}' if metric.at else ''}: {value_text(metric)}, {derivation_text(metric)}"


def _ratio_text(ratio: float | None, names: Sequence[str]) -> str:
    """Return a clause about a ratio and its names: `measured is 2.000 times expected = dp_shard`; empty for neither."""
    named = " or ".join(names)
    if ratio is None:
        return f"measured is {named} times expected" if named else ""
    return f"measured is {ratio:#.4g} times expected{f' = {named}' if named else ''}"


def _common_ratio_text(failed: Sequence[Explanation]) -> str:
    """Return a clause about the first cause, if several laws have its ratio."""
    first = [failed[0], *failed[0].related]
    if len(first) == 1:
        return ""
    is_all = len(failed) == 1 and not failed[0].same_place
    number = "all" if is_all else str(sum(len(each.cases) for each in first))
    return f"; in {number} of them {failed[0].shared_ratio}"


def _common_place_text(failed: Sequence[Explanation]) -> str:
    """Return a clause about the first wrong place of the first cause, if several explanations have it."""
    first = failed[0]
    if first.location is None or not first.same_place:
        return ""
    number = "all" if len(failed) == 1 else str(first.case_count)
    return f"; first wrong in {number} of them: {first.location.place}"


def _cases_text(explanations: Sequence[Explanation]) -> str:
    cases = [case for each in explanations for case in each.all_cases]
    return f"{counted(len(cases), 'case')} of {counted(len({case.law for case in cases}), 'law')}"


def _cases_of_law(explanation: Explanation) -> str:
    return f"{counted(len(explanation.cases), 'case')} of {explanation.law}"


def _fails_with(smallest: Smallest) -> str:
    if not smallest.features:
        return "fails without any other feature" if smallest.bound else "fails without any feature"
    text = f"fails with {_joined(smallest.features)}"
    if not smallest.complete:
        return text
    without = {1: "it", 2: "either"}.get(len(smallest.features), "any one of these")
    return f"{text}; {'passes' if smallest.passes else 'does not fail alike'} without {without}"


def _joined(values: Mapping[str, str]) -> str:
    *others, last = [f"{axis} = {value}" for axis, value in values.items()]
    return f"{', '.join(others)} and {last}" if others else last
