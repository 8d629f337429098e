"""`python -m conformance diff A B`: what is different in report B, compared with report A, its baseline."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from conformance.judge.verdicts import Verdict
from conformance.plan.coverage import Coverage, Tally
from conformance.report.drift import Drifted, drifted_facts, drifted_metrics, drifted_times
from conformance.report.headline import restrictions
from conformance.report.schema import CaseResult, Report
from conformance.report.wording import counted, share_text
from reference_trainer.checks import UsageError

Kind = Literal[
    "new-fail",
    "fixed",
    "verdict-changed",
    "metric-moved",
    "new-case",
    "removed",
    "support-gained",
    "support-lost",
    "coverage-fell",
]
"""Kinds of change. Other programs read these words: `metric-moved` is a metric that has drifted."""
HARMLESS: tuple[Kind, ...] = ("fixed", "new-case", "support-gained")
"""Changes that need no review before an upgrade."""
WARNINGS: tuple[Kind, ...] = ("coverage-fell",)
"""Changes that speak against the session, not against what it has judged: they do not count for the exit status."""
RESTRICTIONS = "restrictions"
"""Key of what was compared: why a side does not tell the outcome of its profile; empty if it does."""
_GOOD = (Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.WAIVED)
_ABSENT = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
_OF_THE_MACHINE = "ENV-"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between two reports."""

    kind: Kind
    case: str
    """`LAW/CELL`; `CELL` for facts of a cell, empty of all cells; `LAW`, `pairs` or `triples` for coverage."""
    before: str
    """Verdict, value and unit of a metric, or share of coverage."""
    after: str
    reason: str = ""
    """Reason of the verdict after, name of the metric, or subject of the coverage."""
    ratio: float | None = None
    """Quotient of a metric's value after and its value before."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """All changes between two reports, and what was compared."""

    schema: Literal[1] = 1
    before: dict[str, str]
    after: dict[str, str]
    changes: list[Change]

    @property
    def counts(self) -> Counter[Kind]:
        """Number of changes of each kind."""
        return Counter(change.kind for change in self.changes)

    @property
    def exit_status(self) -> int:
        """1 if any change needs a review, otherwise 0."""
        return int(any(kind not in (*HARMLESS, *WARNINGS) for kind in self.counts))


def read_report(directory: Path) -> Report:
    """Return the report in a directory. Raises UsageError if there is none, or one that cannot be read."""
    try:
        report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    except OSError as error:
        raise UsageError(f"{directory}: no report: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{directory}: the report is cut off, or of another version of the suite: {error}") from None
    if "torch" not in report.environment.get("packages", {}):
        raise UsageError(f"{directory}: the report does not say of which torch it is: another program has written it")
    return report


def diff(before: Report, after: Report, *, any_suite: bool = False) -> Difference:
    """Return the changes from one report to another.

    Raises UsageError if a session ended early, and for reports of different suites unless `any_suite` is set.
    """
    for name, report in (("first", before), ("second", after)):
        if report.executed < report.planned:
            executed = f"{report.executed} of {counted(report.planned, 'case')} executed"
            raise UsageError(f"the {name} session ended early: {executed}")
    if before.suite_digest != after.suite_digest and not any_suite:
        raise UsageError(
            f"judged by different suites ({before.suite_digest}, {after.suite_digest}): what differs may be the suite; "
            "run both with one, or compare all the same with --any-suite"
        )
    changes = [*_cases(before, after), *_cells(before, after), *_coverage(before.coverage, after.coverage)]
    return Difference(before=_title(before), after=_title(after), changes=changes)


def _title(report: Report) -> dict[str, str]:
    device = report.environment["device"]
    return {
        "torch": str(report.environment["packages"]["torch"]),
        "device": f"{device['count']} x {device['name']}",
        "profile": report.profile,
        RESTRICTIONS: "; ".join(restrictions(report)),
        "suite": report.suite_digest,
        "started": report.started,
    }


def _cases(before: Report, after: Report) -> Iterator[Change]:
    old, new = ({case.id: case for case in report.cases} for report in (before, after))
    for name in dict.fromkeys([*old, *new]):
        if name not in old:
            yield Change(kind="new-case", case=name, before="", after=new[name].verdict, reason=new[name].reason)
        elif name not in new:
            yield Change(kind="removed", case=name, before=old[name].verdict, after="")
        else:
            yield from _case(old[name], new[name])


def _case(before: CaseResult, after: CaseResult) -> Iterator[Change]:
    kind = _verdict_change(Verdict(before.verdict), Verdict(after.verdict))
    if kind:
        yield Change(kind=kind, case=after.id, before=before.verdict, after=after.verdict, reason=after.reason)
    elif before.verdict in _GOOD and not before.law.startswith(_OF_THE_MACHINE):
        yield from (_drift(after.id, drifted) for drifted in drifted_metrics(before.measured, after.measured))


def _verdict_change(before: Verdict, after: Verdict) -> Kind | None:
    if before == after or (before in _GOOD and after in _GOOD and Verdict.WAIVED not in (before, after)):
        return None
    if after in _ABSENT:
        return "support-lost" if before not in _ABSENT else "verdict-changed"
    if after not in _GOOD and (before in _GOOD or before in _ABSENT):
        return "new-fail"
    if before in _ABSENT:
        return "support-gained"
    return "fixed" if after in _GOOD and before not in _GOOD else "verdict-changed"


def _cells(before: Report, after: Report) -> Iterator[Change]:
    for cell in before.cells.keys() & after.cells.keys():
        yield from (_drift(cell, drifted) for drifted in drifted_facts(before.cells[cell], after.cells[cell]))
    times = drifted_times(before.cells, after.cells)
    if times:
        yield _drift("", times)


def _coverage(before: Coverage, after: Coverage) -> Iterator[Change]:
    """Pairs and triples of which a smaller number or share is seen, and laws that have judged fewer cells.

    The number falls with the share at 100 % where an axis loses a value, or a law's `where` loses cells.
    """
    for name in ("pairs", "triples"):
        old, new = (getattr(side, name).values for side in (before, after))
        if new.seen < old.seen or new.share < old.share:
            yield _fall(name, old, new, "combinations seen by laws on numbers")
    for law, of_law in before.laws.items():
        now = after.laws.get(law)
        judged = Tally(now.judged, now.cells) if now else Tally(0, 0)
        if judged.seen < of_law.judged:
            yield _fall(law, Tally(of_law.judged, of_law.cells), judged, "cells judged")


def _fall(case: str, before: Tally, after: Tally, reason: str) -> Change:
    old, new = (f"{each.seen} of {each.possible}, {share_text(each)}" for each in (before, after))
    return Change(kind="coverage-fell", case=case, before=old, after=new, reason=reason)


def _drift(case: str, drifted: Drifted) -> Change:
    return Change(
        kind="metric-moved",
        case=case,
        before=_value(drifted.before, drifted.unit),
        after=_value(drifted.after, drifted.unit),
        reason=drifted.name,
        ratio=drifted.ratio,
    )


def _value(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value:.6g} {unit}"
