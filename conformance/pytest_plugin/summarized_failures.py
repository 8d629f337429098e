"""Hide from pytest's section FAILURES the cases that the suite's own summary already explains."""

from collections.abc import Generator

import pytest

from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed


def is_summarized(judged: Judged) -> bool:
    """Return whether the summary explains a failed case: a comparison has no traceback worth showing."""
    return judged.verdict in (Verdict.FAIL, Verdict.UNEXPECTED_PASS) and not isinstance(judged.error, CellFailed)


class SummarizedFailures:
    """Plugin that keeps explained failures out of pytest's section FAILURES, and in its short summary.

    Their reports have a plain string as `longrepr`, those of other failures a rendered exception.
    """

    def __init__(self) -> None:
        self._summarized: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the section is written by a wrapper of pytest's own
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None]:
        """Take the failures out before pytest writes its sections."""
        failed = terminalreporter.stats.get("failed", [])
        self._summarized = [report for report in failed if report.when == "call" and isinstance(report.longrepr, str)]
        failed[:] = [report for report in failed if report not in self._summarized]
        return (yield)

    def restore(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Put the failures back, for the short summary and the last line."""
        if self._summarized:
            terminalreporter.stats["failed"][:0] = self._summarized
            self._summarized = []
