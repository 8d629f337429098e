"""`--baseline DIR`: a session compared with an earlier report."""

from collections.abc import Mapping
from pathlib import Path

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.diff import diff, read_report
from conformance.report.diff_text import as_text
from conformance.report.drift import Drifted, drifted_metrics
from conformance.report.environment import suite_digest
from conformance.report.schema import Report
from reference_trainer.checks import UsageError


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
