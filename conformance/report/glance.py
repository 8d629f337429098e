"""First glance at a report: at most three findings, each in one line that leads to its cases."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import msgspec
from msgspec.structs import replace

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.explain import Explanation
from conformance.report.schema import CaseResult
from conformance.report.sections import narrowest_margin
from conformance.report.wording import counted

MAX_FINDINGS = 3
_MAX_TEXT = 200


class Finding(msgspec.Struct, frozen=True):
    """Line of the first glance."""

    verdict: str
    """Verdict of its cases."""
    subject: str
    """Laws and number of cases: `PAR-1 and 2 more laws, 54 cases`."""
    text: str
    anchor: str
    """Place in report.html: the id of a case or a cause."""


def findings(cases: Sequence[CaseResult], explanations: Sequence[Explanation]) -> list[Finding]:
    """Return causes of failures, or else waived faults of torch, those of most cases first, and the narrowest margin.

    `explanations` are those of `explain`, in its order.
    """
    return list(islice(chain(_causes(explanations), _waived(cases), _nearest(cases)), MAX_FINDINGS))


def cause_text(explanation: Explanation) -> str:
    """Return a cause in one line: the ratio and the first wrong place where they are known, or else the reason."""
    place = f"first wrong: {explanation.location.place}" if explanation.location else ""
    return _shortened("; ".join(filter(None, [explanation.shared_ratio, place])) or explanation.short_reason)


def waived_fault(case: CaseResult) -> str:
    """Return issue and reason of the waiver of a waived case: several faults may have one issue or page."""
    return case.reason.partition("; ")[0]


def cause_anchor(number: int) -> str:
    """Return the id, in report.html, of the explanation with this number, from 1."""
    return f"cause-{number}"


def _causes(explanations: Sequence[Explanation]) -> Iterator[Finding]:
    for number, each in enumerate(explanations, start=1):
        yield _finding(each.all_cases, cause_text(each), cause_anchor(number))


def _waived(cases: Sequence[CaseResult]) -> Iterator[Finding]:
    by_fault: dict[str, list[CaseResult]] = defaultdict(list)
    for case in cases:
        if case.verdict == Verdict.WAIVED:
            by_fault[waived_fault(case)].append(case)
    for fault, group in sorted(by_fault.items(), key=lambda entry: -len(entry[1])):
        yield _finding(group, fault, group[0].id)


def _nearest(cases: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield the rounding error that comes nearest to its bound; counts and bytes are at their bounds by design."""
    passed = [case for case in cases if case.verdict == Verdict.PASS]
    found = narrowest_margin([replace(case, measured=_rounding(case)) for case in passed])
    if found.share is not None:
        (case,) = (case for case in passed if case.id == found.case)
        yield Finding(case.verdict, case.law, f"the narrowest margin: {found.text}: {found.metric}", case.id)


def _rounding(case: CaseResult) -> dict[str, Measurement]:
    return {name: metric for name, metric in case.measured.items() if metric.kind == "rounding"}


def _finding(cases: Sequence[CaseResult], text: str, anchor: str) -> Finding:
    first, *others = dict.fromkeys(case.law for case in cases)
    laws = f"{first} and {counted(len(others), 'more law')}" if others else first
    return Finding(cases[0].verdict, f"{laws}, {counted(len(cases), 'case')}", _shortened(text), anchor)


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MAX_TEXT, placeholder=" ...")
