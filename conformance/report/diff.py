"""`python -m conformance diff A B`: what is different in report B, beside report A, its baseline."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from conformance.judge.verdicts import Verdict
from conformance.report.drift import Moved, moved_facts, moved_figures, moved_times
from conformance.report.schema import CaseResult, Report

Kind = Literal[
    "new-fail",
    "fixed",
    "verdict-changed",
    "metric-moved",
    "new-case",
    "removed",
    "support-gained",
    "support-lost",
]
HARMLESS: tuple[Kind, ...] = ("fixed", "new-case", "support-gained")
"""What nobody has to look at before the new version is used."""
_GOOD = (Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.WAIVED)
_ABSENT = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
_OF_THE_MACHINE = "ENV-"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference."""

    kind: Kind
    case: str
    """`LAW/CELL`; `CELL` for facts of a cell, `` for those of all cells."""
    before: str
    """Verdict, or figure."""
    after: str
    reason: str = ""
    """Of the verdict after; or which figure."""
    ratio: float | None = None
    """Of a figure, after over before."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """All that is different, and what was compared."""

    schema: Literal[1] = 1
    before: dict[str, str]
    after: dict[str, str]
    changes: list[Change]

    @property
    def counts(self) -> Counter[Kind]:
        """By kind."""
        return Counter(change.kind for change in self.changes)

    @property
    def exit_status(self) -> int:
        """1 if there is anything but improvements."""
        return int(any(kind not in HARMLESS for kind in self.counts))


def read_report(directory: Path) -> Report:
    """Raises ValueError if there is none, or one that cannot be read."""
    try:
        return msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    except OSError as error:
        raise ValueError(f"{directory}: no report: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{directory}: the report is cut off, or of another version of the suite: {error}") from None


def diff(before: Report, after: Report, *, any_suite: bool = False) -> Difference:
    """Raises ValueError for reports of different suites, unless told otherwise; and for ends that were not reached."""
    for name, report in (("first", before), ("second", after)):
        if report.executed < report.planned:
            raise ValueError(f"the {name} session ended early: {report.executed} of {report.planned} cases executed")
    if before.suite_digest != after.suite_digest and not any_suite:
        raise ValueError(
            f"judged by different suites ({before.suite_digest}, {after.suite_digest}): what differs may be the suite; "
            "run both with one, or compare all the same with --any-suite"
        )
    changes = [*_cases(before, after), *_cells(before, after)]
    return Difference(before=_title(before), after=_title(after), changes=changes)


def _title(report: Report) -> dict[str, str]:
    device = report.environment["device"]
    return {
        "torch": str(report.environment["packages"]["torch"]),
        "device": f"{device['count']} x {device['name']}",
        "profile": report.profile,
        "suite": report.suite_digest,
        "started": report.started,
    }


def _cases(before: Report, after: Report) -> Iterator[Change]:
    old, new = ({case.id: case for case in report.cases} for report in (before, after))
    for name in dict.fromkeys([*old, *new]):
        one, other = old.get(name), new.get(name)
        if one is None and other is not None:
            yield Change(kind="new-case", case=name, before="", after=other.verdict, reason=other.reason)
        elif other is None and one is not None:
            yield Change(kind="removed", case=name, before=one.verdict, after="")
        elif one is not None and other is not None:
            yield from _case(one, other)


def _case(before: CaseResult, after: CaseResult) -> Iterator[Change]:
    kind = _verdict_change(Verdict(before.verdict), Verdict(after.verdict))
    if kind:
        yield Change(kind=kind, case=after.id, before=before.verdict, after=after.verdict, reason=after.reason)
    elif before.verdict in _GOOD and not before.law.startswith(_OF_THE_MACHINE):
        yield from (_moved(after.id, moved) for moved in moved_figures(before.measured, after.measured))


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
        yield from (_moved(cell, moved) for moved in moved_facts(before.cells[cell], after.cells[cell]))
    times = moved_times(before.cells, after.cells)
    if times:
        yield _moved("", times)


def _moved(case: str, moved: Moved) -> Change:
    return Change(
        kind="metric-moved",
        case=case,
        before=_figure(moved.before, moved.unit),
        after=_figure(moved.after, moved.unit),
        reason=moved.name,
        ratio=moved.ratio,
    )


def _figure(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value:.6g} {unit}"
