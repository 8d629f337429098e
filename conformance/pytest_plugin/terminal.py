"""Terminal of a session: its early end by Ctrl-C or SIGTERM, and the failures that its own summary explains."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import Any, NoReturn

import psutil
import pytest

from conformance.judge.judge import Judged
from conformance.judge.verdicts import BAD, Verdict
from conformance.outcomes import CellFailed

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_cleanly_on_signals() -> None:
    """Let the first SIGINT or SIGTERM end the session, so that ranks are ended and a partial report is left.

    Batch systems and CI send SIGTERM. Further signals are ignored: `timeout -s INT` sends two, to the process and to
    its group. Does nothing outside of the main thread, which alone may set handlers.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    raise KeyboardInterrupt(signal.Signals(number).name)


class BriefInterrupt:
    """Plugin that cuts an interrupt's traceback to its last entry.

    pytest renders the full traceback, and without `--full-trace` shows no more than the last entry.
    """

    def __init__(self, *, full: bool) -> None:
        self._full = full

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Drop entries without a line: CPython 3.11 may be interrupted there, and pytest 9.2 fails to render them."""
        known = excinfo.traceback.filter(_has_line)
        excinfo.traceback = known if self._full else known[-1:]


def _has_line(entry: Any) -> bool:
    try:
        return bool(entry.lineno >= 0)
    except TypeError:
        return False


class EndsWorkers:
    """Plugin of the controller that ends xdist's workers at once; xdist itself waits 10 s for busy workers."""

    @pytest.hookimpl(tryfirst=True)  # workers end while pytest renders the traceback
    def pytest_keyboard_interrupt(self) -> None:
        """Terminate the children of this process; workers end their own ranks."""
        for worker in psutil.Process(os.getpid()).children():
            with suppress(psutil.NoSuchProcess):
                worker.terminate()


def is_summarized(judged: Judged) -> bool:
    """Return whether the summary explains a failed case: a comparison has no traceback worth showing.

    The traceback of another trainer is in the summary, the stacks of its ranks are in a file.
    """
    if judged.case.trainer is not None:
        return judged.verdict in BAD and judged.verdict != Verdict.ERROR
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
