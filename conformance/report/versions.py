"""Laws by version of torch: reports of one profile next to each other, a column for each."""

from collections.abc import Iterator, Sequence

import msgspec

from conformance.judge.verdicts import BAD
from conformance.outcomes import SWEPT_OUTCOMES, SweptOutcome, swept_metric
from conformance.plan.scopes import in_order
from conformance.report.headline import Headline, headline
from conformance.report.law_overview import verdict_counts
from conformance.report.schema import CaseResult, Report
from reference_trainer.checks import UsageError


class VersionColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one version."""

    version: str
    headline: Headline
    exit_code: int
    verdicts: dict[str, int]


class Judged(msgspec.Struct, frozen=True):
    """Cases of one law in one version."""

    verdicts: dict[str, int]
    """Number of cases by verdict; empty if the version has no case of the law."""
    failed: list[CaseResult]
    """Cases that speak against conformance."""

    @property
    def text(self) -> str:
        """Verdicts in words: `41 pass, 2 fail`, or `-` without a case."""
        return ", ".join(f"{number} {verdict}" for verdict, number in self.verdicts.items()) or "-"


class LawRow(msgspec.Struct, frozen=True, kw_only=True):
    """One law in all versions."""

    law: str
    must: str
    by_version: list[Judged]
    cells: list[tuple[str, list[CaseResult | None]]]
    """Cells of the law, with the case of each version."""

    @property
    def differs(self) -> bool:
        """True if the verdicts of two versions differ in any case."""
        return any(len({case.verdict if case else "" for case in cases}) > 1 for _, cases in self.cells)


class SweepRow(msgspec.Struct, frozen=True):
    """One sweep in all versions."""

    case: str
    by_version: list[dict[SweptOutcome, int] | None]
    """Number of the sweep's cases by outcome; None for a version in which it did not run."""


class VersionTable(msgspec.Struct, frozen=True, kw_only=True):
    """Laws by version."""

    profile: str
    planned: int
    columns: list[VersionColumn]
    rows: list[LawRow]
    sweeps: list[SweepRow]
    """Sweeps that ran in any version."""


def version_table(reports: Sequence[Report]) -> VersionTable:
    """Return laws by version, in the order of the reports.

    Raises UsageError for two reports of one version, and for reports of different profiles or matrices.
    """
    sessions = {(report.profile, report.planned) for report in reports}
    if len(sessions) > 1:
        raise UsageError(f"reports are of different profiles: {sorted(sessions)}: give those of one")
    versions = [str(report.environment["packages"]["torch"]) for report in reports]
    if len(set(versions)) < len(versions):
        raise UsageError(f"reports are of torch {', '.join(versions)}: give one for each version")
    ((profile, planned),) = sessions
    laws = dict.fromkeys(case.law for report in reports for case in report.cases)
    return VersionTable(
        profile=profile,
        planned=planned,
        columns=[_column(version, report) for version, report in zip(versions, reports, strict=True)],
        rows=[_row(law, reports) for law in sorted(laws, key=in_order)],
        sweeps=list(_sweeps(reports)),
    )


def _column(version: str, report: Report) -> VersionColumn:
    return VersionColumn(
        version=version,
        headline=headline(report),
        exit_code=report.exit_code,
        verdicts=verdict_counts(report.cases),
    )


def _row(law: str, reports: Sequence[Report]) -> LawRow:
    by_version = [{case.cell: case for case in report.cases if case.law == law} for report in reports]
    cells = sorted({cell for cases in by_version for cell in cases})
    return LawRow(
        law=law,
        must=next(case.must for cases in reversed(by_version) for case in cases.values()),
        by_version=[_judged(list(cases.values())) for cases in by_version],
        cells=[(cell, [cases.get(cell) for cases in by_version]) for cell in cells],
    )


def _sweeps(reports: Sequence[Report]) -> Iterator[SweepRow]:
    by_version = [{case.id: counts for case in report.cases if (counts := _swept(case))} for report in reports]
    for case in sorted({case for cases in by_version for case in cases}):
        yield SweepRow(case, [cases.get(case) for cases in by_version])


def _swept(case: CaseResult) -> dict[SweptOutcome, int]:
    """Return how often each outcome came up in the case of a sweep; empty for any other case."""
    metrics = {outcome: case.measured.get(swept_metric(outcome)) for outcome in SWEPT_OUTCOMES}
    return {outcome: int(metric.value or 0) for outcome, metric in metrics.items() if metric}


def _judged(cases: Sequence[CaseResult]) -> Judged:
    return Judged(verdict_counts(cases), [case for case in cases if case.verdict in BAD])
