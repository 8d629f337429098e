"""Content of the site, from reports alone: columns, laws, findings, cases, trends, differences, trainers, defects."""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec
from packaging.version import Version

from conformance.judge.verdicts import Verdict
from conformance.plan.scopes import in_order
from conformance.report.coverage import total_rows
from conformance.report.diff import Change, Kind, diff
from conformance.report.explain import explain
from conformance.report.glance import cause_text, waived_fault
from conformance.report.schema import CaseResult, Report, verdict_counts
from conformance.report.sections import Narrowest, narrowest_margin
from conformance.report.text import device_text, headline
from conformance.report.torch_coverage import total_line
from reference_trainer.checks import UsageError

CODES = dict(zip(Verdict, "pqnwfutce-", strict=True))
"""A letter for each verdict, and a space for a case that a report does not have: most of the site's data are these."""
_ABSENT = " "
_MAX_WORDS = 300
"""Longest reason or margin: a reason may name every tensor of a model, and the report has it."""
MAX_CHANGES = 60
"""Changes of a pair that the site shows."""


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One report, as the heads of tables and the list of reports show it."""

    torch: str
    device: str
    """Devices, with the substrates of judged cases: `CPU (gloo, simulated)`."""
    device_type: str
    """Type of the devices, `cpu`, `cuda` or `sim`: trends are by type."""
    profile: str
    started: str
    verdict: str
    """Outcome of the report, and the cases that an incomplete session has run."""
    line: str
    """Headline of the report: outcome, restrictions and subject."""
    exit_code: int
    planned: int
    executed: int
    duration_s: float
    verdicts: dict[str, int]
    nothing_about: str
    coverage: list[list[str]]
    """Rows of the coverage of pairs and triples."""
    torch_coverage: str


class LawRow(msgspec.Struct, frozen=True, kw_only=True):
    """Law, with its verdicts, its narrowest margin and its time in each column."""

    id: str
    must: str
    verdicts: list[dict[str, int]]
    """Number of cases by verdict, by column; empty where the column has none."""
    narrowest: list[Narrowest]
    seconds: list[float | None]
    """Time of all cases in seconds, by column; None where the column has none."""


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Fault that cases show, waived or failing."""

    name: str
    """Issue of a waiver and its reason; for a failure, its cause in one line."""
    is_waived: bool
    laws: list[str]
    cases: list[list[int]]
    """Numbers of its cases in `CaseData`, by column."""


class CaseData(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts and reasons of all cases, in a form of few bytes."""

    laws: list[str]
    cells: list[str]
    cases: list[list[int]]
    """Numbers of law and cell of each case."""
    verdicts: list[str]
    """A letter for each case, by column: see `CODES`."""
    words: list[str]
    """Reasons and margins, each text once."""
    reasons: list[dict[int, int]]
    """Numbers of words by case, by column; of cases with a reason alone."""
    margins: list[dict[int, int]]
    """Numbers of words by case, by column; of cases with a metric that has bounds."""

    @property
    def pairs_of_names(self) -> list[tuple[str, str]]:
        """Law and cell of each case."""
        return [(self.laws[law], self.cells[cell]) for law, cell in self.cases]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of two columns, as `conformance diff` finds it."""

    before: int
    after: int
    caution: str
    """Reason for which the reports cannot be compared, or not to the letter; empty if they can."""
    counts: Mapping[Kind, int]
    """Number of changes by kind."""
    changes: list[Change]
    """Changes, at most `MAX_CHANGES`; `conformance diff` has all."""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Content of all pages."""

    columns: list[Column]
    laws: list[LawRow]
    findings: list[FindingRow]
    data: CaseData
    pairs: list[Pair]
    trainers: list[Report]
    """Reports on other people's trainers, whose cells are others."""


def content_of(reports: Sequence[Report]) -> Content:
    """Return the content of the site; columns are in the order of versions of torch, then in that of the reports.

    Raises UsageError if there is no report on the reference trainer.
    """
    own = sorted((report for report in reports if report.trainer is None), key=_version)
    if not own:
        raise UsageError("no report is about the reference trainer: a site needs at least one, of a session of pytest")
    data = _case_data(own)
    return Content(
        columns=[_column(report) for report in own],
        laws=_law_rows(own),
        findings=_finding_rows(own, data),
        data=data,
        pairs=[_pair(own, before, after) for before, after in combinations(range(len(own)), 2)],
        trainers=[report for report in reports if report.trainer is not None],
    )


def _version(report: Report) -> Version:
    return Version(report.environment["packages"]["torch"])


def _column(report: Report) -> Column:
    head = headline(report)
    return Column(
        torch=str(report.environment["packages"]["torch"]),
        device=device_text(report),
        device_type=report.environment["device"].get("type", ""),
        profile=report.profile,
        started=report.started,
        verdict=head.verdict,
        line=head.line,
        exit_code=report.exit_code,
        planned=report.planned,
        executed=report.executed,
        duration_s=report.duration_s,
        verdicts=report.verdicts,
        nothing_about=head.nothing_about,
        coverage=total_rows(report.coverage),
        torch_coverage=total_line(report.torch_coverage) if report.torch_coverage else "",
    )


def _law_rows(reports: Sequence[Report]) -> list[LawRow]:
    by_law: dict[str, list[list[CaseResult]]] = defaultdict(lambda: [[] for _ in reports])
    for number, report in enumerate(reports):
        for case in report.cases:
            by_law[case.law][number].append(case)
    return [
        LawRow(
            id=law,
            must=next(case.must for cases in by_law[law] for case in cases),
            verdicts=[verdict_counts(cases) for cases in by_law[law]],
            narrowest=[narrowest_margin(cases) for cases in by_law[law]],
            seconds=[round(sum(case.duration_s for case in cases), 1) if cases else None for cases in by_law[law]],
        )
        for law in sorted(by_law, key=in_order)
    ]


def _finding_rows(reports: Sequence[Report], data: CaseData) -> list[FindingRow]:
    """Return causes of failures, and waived faults by their waivers; failures come first."""
    found: dict[tuple[bool, str], list[list[CaseResult]]] = defaultdict(lambda: [[] for _ in reports])
    for column, report in enumerate(reports):
        for cause in explain(report):
            if not cause.is_drift:
                found[False, cause_text(cause)][column] += cause.all_cases
        for case in report.cases:
            if case.verdict == Verdict.WAIVED:
                found[True, waived_fault(case)][column].append(case)
    numbers = {pair: number for number, pair in enumerate(data.pairs_of_names)}
    return [
        FindingRow(
            name=name,
            is_waived=is_waived,
            laws=sorted({case.law for cases in columns for case in cases}, key=in_order),
            cases=[[numbers[case.law, case.cell] for case in cases] for cases in columns],
        )
        for (is_waived, name), columns in sorted(found.items())
    ]


def _case_data(reports: Sequence[Report]) -> CaseData:
    by_id = [{case.id: case for case in report.cases} for report in reports]
    ids = {case.id: case for report in reports for case in report.cases}
    shown = sorted(ids.values(), key=lambda case: (in_order(case.law), case.cell))
    laws = {law: number for number, law in enumerate(dict.fromkeys(case.law for case in shown))}
    cells = {cell: number for number, cell in enumerate(dict.fromkeys(case.cell for case in shown))}
    words: dict[str, int] = {}

    def numbered(told: Mapping[int, str]) -> dict[int, int]:
        short = {
            number: textwrap.shorten(text, _MAX_WORDS, placeholder=" ...") for number, text in told.items() if text
        }
        return {number: words.setdefault(text, len(words)) for number, text in short.items()}

    columns = [[cases.get(case.id) for case in shown] for cases in by_id]
    return CaseData(
        laws=list(laws),
        cells=list(cells),
        cases=[[laws[case.law], cells[case.cell]] for case in shown],
        verdicts=["".join(CODES[Verdict(case.verdict)] if case else _ABSENT for case in column) for column in columns],
        reasons=[numbered({n: case.reason for n, case in enumerate(column) if case}) for column in columns],
        margins=[numbered({n: _margin_text(case) for n, case in enumerate(column) if case}) for column in columns],
        words=list(words),
    )


def _margin_text(case: CaseResult) -> str:
    narrowest = narrowest_margin([case])
    return f"{narrowest.text}: {narrowest.metric}" if narrowest.metric else ""


def _pair(reports: Sequence[Report], before: int, after: int) -> Pair:
    digests = {reports[number].suite_digest for number in (before, after)}
    try:
        difference = diff(reports[before], reports[after], any_suite=True)
    except UsageError as error:
        return Pair(before=before, after=after, caution=str(error), counts={}, changes=[])
    return Pair(
        before=before,
        after=after,
        caution="judged by different versions of the suite, which may be the difference" if len(digests) > 1 else "",
        counts=difference.counts,
        changes=difference.changes[:MAX_CHANGES],
    )
