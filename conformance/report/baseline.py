"""`--baseline DIR`: a session beside an earlier report."""

from collections.abc import Mapping
from pathlib import Path

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.diff import diff, read_report
from conformance.report.diff_text import as_text
from conformance.report.drift import Moved, moved_figures
from conformance.report.environment import suite_digest
from conformance.report.schema import Report


class Baseline:
    """An earlier report.

    Raises ValueError if there is none in the directory, or if it was judged by another suite: see `diff --any-suite`.
    """

    def __init__(self, directory: Path) -> None:
        self.report = read_report(directory)
        if self.report.suite_digest != suite_digest():
            raise ValueError(
                f"--baseline {directory}: judged by another suite ({self.report.suite_digest}, this is "
                f"{suite_digest()}): run it again, or compare afterwards with python -m conformance diff --any-suite"
            )
        self._cases = {case.id: case for case in self.report.cases}

    def judge(self, case: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        """The verdict on a case, `LAW/CELL`, that passes: whether its figures are those of the baseline."""
        known = self._cases.get(case)
        moved = moved_figures(known.measured, measured) if known and known.verdict == Verdict.PASS else []
        if case.startswith("ENV-") or not moved:
            return Verdict.PASS, ""
        return Verdict.QUALITY_WARNING, "; ".join(map(_told, moved))

    def difference(self, report: Report) -> str:
        """As text; of a session that ended early there is none."""
        try:
            return f"beside the baseline: {as_text(diff(self.report, report))}"
        except ValueError as error:
            return f"no comparison with the baseline: {error}"


def _told(moved: Moved) -> str:
    before, after = ("none" if value is None else f"{value:.6g}" for value in (moved.before, moved.after))
    return f"{moved.name}: {after} {moved.unit}, {before} in the baseline"
