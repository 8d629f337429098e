"""Difference between two reports: changes of verdicts, and metrics that have drifted by more than noise.

A metric has drifted if it changed by more than one and the same program shows from run to run. That depends on its
kind (`judge.measurements.Kind`):

- `exact` and `memory`: what torch decides (bytes, collectives, counts) is the same in every run, but for what a law
  leaves open by its bounds. A change counts if it is more than 1 % and more than the distance between the bounds;
- `rounding`: rounding errors depend on the order of sums, which another version may choose otherwise. They count if
  they fill their bound by a tenth or more, and by another factor than 2;
- `time`: never, for a single metric. Steps are compared as ratios to a fixed piece of work that the same ranks did in
  the same run, over all cells: the median must change by more than a third, since two processors show a tenth to a
  quarter between runs of one version.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from tabulate import tabulate

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.plan.coverage import Coverage, Tally
from conformance.report.facts import CellFacts, suite_digest
from conformance.report.schema import CaseResult, Report, read_report
from conformance.report.text import restrictions
from conformance.report.wording import counted, share_text
from conformance.torch_coverage.counting import TorchCoverage
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
MIRRORED: dict[Kind, Kind] = {
    "new-fail": "fixed",
    "fixed": "new-fail",
    "new-case": "removed",
    "removed": "new-case",
    "support-gained": "support-lost",
    "support-lost": "support-gained",
}
"""Kinds of change from the second report to the first; others have no opposite."""
_HARMLESS: tuple[Kind, ...] = ("fixed", "new-case", "support-gained")
"""Changes that need no review before an upgrade."""
_WARNINGS: tuple[Kind, ...] = ("coverage-fell",)
"""Changes of the session itself, not of its subject: they do not count for the exit status."""
_RESTRICTIONS = "restrictions"
"""Key of `Difference.before`: reasons why a side does not tell the outcome of its profile; empty if it does."""
_GOOD = (Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.WAIVED)
_ABSENT = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
_MACHINE_LAWS = "ENV-"
_DRIFT: Kind = "metric-moved"
_MAX_ROWS = 30
"""Rows of each table that the terminal shows; JSON has all."""
_EXACT_CHANGE = 0.01
_ROUNDING_FACTOR = 2.0
_ROUNDING_SHARE = 0.1
_TIME_FACTOR = 4 / 3
_MIN_CELLS_FOR_TIME = 8


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
    """All changes between two reports, with the facts that distinguish the sides."""

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
        return int(any(kind not in (*_HARMLESS, *_WARNINGS) for kind in self.counts))


class Drifted(msgspec.Struct, frozen=True):
    """Metric that has drifted."""

    name: str
    before: float | None
    """None where there was no value, or where the value was not finite."""
    after: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """Quotient of the value after and the value before; None if there is none."""
        return self.after / self.before if self.before and self.after is not None else None


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
    changes += _torch_coverage(before.torch_coverage, after.torch_coverage)
    return Difference(before=_title(before), after=_title(after), changes=changes)


def _title(report: Report) -> dict[str, str]:
    device = report.environment["device"]
    return {
        "torch": str(report.environment["packages"]["torch"]),
        "device": f"{device['count']} x {device['name']}",
        "profile": report.profile,
        _RESTRICTIONS: "; ".join(restrictions(report)),
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
    elif before.verdict in _GOOD and not before.law.startswith(_MACHINE_LAWS):
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
    for law, old_law in before.laws.items():
        new_law = after.laws.get(law)
        judged = Tally(new_law.judged, new_law.cells) if new_law else Tally(0, 0)
        if judged.seen < old_law.judged:
            yield _fall(law, Tally(old_law.judged, old_law.cells), judged, "cells judged")


def _torch_coverage(before: TorchCoverage | None, after: TorchCoverage | None) -> Iterator[Change]:
    """Areas of torch of which a smaller share of branches or parameters is seen, if both sessions measured it."""
    if before is None or after is None:
        return
    for name in before.areas.keys() & after.areas.keys():
        for what in ("branches", "parameters"):
            old, new = (getattr(side.areas[name], what) for side in (before, after))
            if new.share < old.share:
                yield _fall(name, old, new, f"{what} of torch seen by judged runs")


def _fall(case: str, before: Tally, after: Tally, reason: str) -> Change:
    old, new = (f"{each.seen} of {each.possible}, {share_text(each)}" for each in (before, after))
    return Change(kind="coverage-fell", case=case, before=old, after=new, reason=reason)


def _drift(case: str, drifted: Drifted) -> Change:
    return Change(
        kind=_DRIFT,
        case=case,
        before=_value(drifted.before, drifted.unit),
        after=_value(drifted.after, drifted.unit),
        reason=drifted.name,
        ratio=drifted.ratio,
    )


def _value(value: float | None, unit: str) -> str:
    return "none" if value is None else f"{value:.6g} {unit}"


# Drift


def drifted_metrics(before: Mapping[str, Measurement], after: Mapping[str, Measurement]) -> list[Drifted]:
    """Return the metrics of one case that have drifted; times of the machine never do."""
    drifted = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        known = new or old
        if known and known.kind != "time" and _has_drifted(old, new):
            drifted.append(Drifted(name, old.value if old else None, new.value if new else None, known.unit))
    return drifted


def _has_drifted(before: Measurement | None, after: Measurement | None) -> bool:
    if before is None or after is None or before.value is None or after.value is None:
        return (before.value if before else None) != (after.value if after else None)
    if after.kind == "rounding":
        return _rounding_drifted(before, after)
    return _exact_drifted(before.value, after.value, slack=max(_slack(before), _slack(after)))


def _exact_drifted(before: float, after: float, *, slack: float = 0.0) -> bool:
    change = abs(after - before)
    return change > slack and change > _EXACT_CHANGE * max(abs(before), abs(after))


def _slack(metric: Measurement) -> float:
    """Distance between the bounds, which a law leaves open."""
    return metric.upper - metric.lower if metric.upper is not None and metric.lower is not None else 0.0


def _rounding_drifted(before: Measurement, after: Measurement) -> bool:
    low, high = sorted([_filled_share(before), _filled_share(after)])
    return high >= _ROUNDING_SHARE and high > _ROUNDING_FACTOR * low


def _filled_share(metric: Measurement) -> float:
    """Share of its bound that a metric fills: by its logarithm for a ratio, which may lie on either side of 1."""
    value = metric.value or 0.0
    if metric.lower and metric.upper and metric.lower > 0 and value > 0:
        return abs(math.log(value)) / math.log(metric.upper) if metric.upper > 1 else 0.0
    return abs(value) / metric.upper if metric.upper else 0.0


def drifted_facts(before: CellFacts, after: CellFacts) -> list[Drifted]:
    """Return the drifted counts of one cell's traffic, which has neither bounds nor noise."""
    bytes_sent = _drifted_counts("wire", before.wire_bytes, after.wire_bytes, unit="bytes")
    collectives = _drifted_counts("number of", before.collectives, after.collectives, unit="collectives")
    return [*bytes_sent, *collectives]


def _drifted_counts(what: str, before: Mapping[str, int], after: Mapping[str, int], *, unit: str) -> Iterator[Drifted]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, 0), after.get(name, 0)
        if _exact_drifted(old, new):
            yield Drifted(f"{what} {name}", old, new, unit)


def drifted_times(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Drifted | None:
    """Return the drift of the time of a step: the median over all cells, relative to the fixed work of each run.

    None if there are too few cells, or if the median has not drifted.
    """
    ratios = list(_time_ratios(before, after))
    if len(ratios) < _MIN_CELLS_FOR_TIME:
        return None
    median = statistics.median(ratios)
    if 1 / _TIME_FACTOR <= median <= _TIME_FACTOR:
        return None
    return Drifted(f"time of a step, median of {len(ratios)} cells", 1.0, median, "of the time before")


def _time_ratios(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Iterator[float]:
    for cell in before.keys() & after.keys():
        old, new = before[cell], after[cell]
        if old.substrate == new.substrate and old.step_s and new.step_s:
            yield _relative_step_time(new) / _relative_step_time(old)


def _relative_step_time(facts: CellFacts) -> float:
    return min(facts.step_s) / facts.calibration_s


# Words


def as_text(difference: Difference) -> str:
    """Return the sides, changes of verdicts, drifted metrics by law and name, and coverage, for a terminal."""
    tables = [_limited(rows, headers) for _title, headers, rows in _tables(difference)]
    return "\n\n".join([title(difference), _sides(difference, "simple"), *tables, summary(difference)])


def as_markdown(difference: Difference) -> str:
    """Return the difference as markdown, for the step summary of a CI job or a comment."""
    sections = [f"# Conformance: {title(difference)}", summary(difference), _sides(difference, "github")]
    for name, headers, rows in _tables(difference):
        sections += [f"## {name}", tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(sections) + "\n"


def title(difference: Difference) -> str:
    """Return one line: the two sides, with the restrictions of each, and that they differ in these if they do."""
    before, after = (_side(side) for side in (difference.before, difference.after))
    alike = difference.before[_RESTRICTIONS] == difference.after[_RESTRICTIONS]
    caution = "" if alike else ": not restricted alike, so not every change is torch's"
    return f"{after}, compared with {before}{caution}"


def summary(difference: Difference) -> str:
    """Return one line with the number of changes of each kind."""
    if not difference.changes:
        return "no difference"
    return ", ".join(f"{number} {kind}" for kind, number in sorted(difference.counts.items()))


def _side(side: Mapping[str, str]) -> str:
    restricted = f" ({side[_RESTRICTIONS]})" if side[_RESTRICTIONS] else ""
    return f"torch {side['torch']}, profile {side['profile']}{restricted}"


def _sides(difference: Difference, table_format: str) -> str:
    """Return a table of facts that distinguish the two sessions, such as the version of torch."""
    sides = ([name, difference.before[name], difference.after[name]] for name in difference.before)
    rows = [row for row in sides if any(row[1:])]
    return tabulate(rows, headers=["", "before", "after"], tablefmt=table_format, disable_numparse=True)


def _tables(difference: Difference) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, headers and rows of each table that has rows."""
    fallen = [change for change in difference.changes if change.kind in _WARNINGS]
    drifted = [change for change in difference.changes if change.kind == _DRIFT]
    verdicts = [change for change in difference.changes if change.kind not in (_DRIFT, *_WARNINGS)]
    verdicts.sort(key=lambda change: change.kind in _HARMLESS)
    if verdicts:
        rows = [[change.kind, change.case, change.before, change.after, change.reason] for change in verdicts]
        yield "Verdicts", ["change", "case", "before", "after", "reason"], rows
    if drifted:
        headers = ["law", "metric", "cases", "after / before", "for example", "before", "after"]
        yield "Metrics", headers, _metric_rows(drifted)
    if fallen:
        rows = [[change.case, change.before, change.after, change.reason] for change in fallen]
        yield "Coverage", ["coverage", "before", "after", "of what"], rows


def _metric_rows(drifted: Sequence[Change]) -> list[list[str]]:
    """Return a row for each law and name of drifted metrics, the largest groups first."""
    by_name: dict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in drifted:
        law = change.case.partition("/")[0] if "/" in change.case else ""
        by_name[law, change.reason].append(change)
    rows = []
    for (law, name), changes in sorted(by_name.items(), key=lambda item: -len(item[1])):
        first = changes[0]
        cell = first.case.partition("/")[2] or first.case
        rows.append([law, name, str(len(changes)), _ratio_range(changes), cell, first.before, first.after])
    return rows


def _ratio_range(changes: Sequence[Change]) -> str:
    ratios = sorted(change.ratio for change in changes if change.ratio is not None)
    if not ratios:
        return ""
    low, high = f"{ratios[0]:.3g}", f"{ratios[-1]:.3g}"
    return low if low == high else f"{low} to {high}"


def _limited(rows: list[list[str]], headers: list[str]) -> str:
    widths = [None, *[60] * (len(headers) - 1)]
    table = tabulate(rows[:_MAX_ROWS], headers=headers, disable_numparse=True, maxcolwidths=widths)
    return table if len(rows) <= _MAX_ROWS else f"{table}\n... and {len(rows) - _MAX_ROWS} more: see --json"


# Baseline


class Baseline:
    """Earlier report that a session is compared with."""

    def __init__(self, directory: Path) -> None:
        """Read the report in a directory.

        Raises UsageError if there is none, or one that was judged by another suite: see `diff --any-suite`.
        """
        self.report = read_report(directory)
        if self.report.suite_digest != suite_digest():
            raise UsageError(
                f"--baseline {directory}: judged by another suite ({self.report.suite_digest}, this is "
                f"{suite_digest()}): run it again, or compare afterwards with python -m conformance diff --any-suite"
            )
        self._cases = {case.id: case for case in self.report.cases}

    def judge(self, case: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        """Return verdict and reason for a case, `LAW/CELL`, that passes: a warning if its metrics have drifted."""
        known = self._cases.get(case)
        drifted = drifted_metrics(known.measured, measured) if known and known.verdict == Verdict.PASS else []
        if case.startswith("ENV-") or not drifted:
            return Verdict.PASS, ""
        return Verdict.QUALITY_WARNING, "; ".join(map(_text, drifted))

    def difference(self, report: Report) -> str:
        """Return the difference between the baseline and a report, as text; none if a session ended early."""
        try:
            return f"compared with the baseline: {as_text(diff(self.report, report))}"
        except UsageError as error:
            return f"no comparison with the baseline: {error}"


def _text(drifted: Drifted) -> str:
    before, after = ("none" if value is None else f"{value:.6g}" for value in (drifted.before, drifted.after))
    return f"{drifted.name}: {after} {drifted.unit}, {before} in the baseline"
