"""Progress of a session: an estimate before the first case, and a line of progress from time to time.

The line says which laws have failed so far and which case has run longest. A thread writes it, since a case may take
minutes in which no hook of pytest is called.
"""

import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TextIO

import pytest

from conformance.judge.verdicts import BAD
from conformance.plan.lock import STARTUP_S
from conformance.report.wording import counted

_INTERVAL_S = 30.0
_NAMED_LAWS = 5
_KNOWN_SHARE = 0.8
"""Minimum share of cases with durations of earlier sessions for an estimate."""


class Progress:
    """Plugin of the process that the user started, which is notified of all cases of all workers."""

    def __init__(self, out: TextIO, *, workers: int, interval_s: float = _INTERVAL_S) -> None:
        """Take a stream for the lines, the number of processes that run cases, and the time between lines."""
        self._out, self._workers, self._interval_s = out, workers, interval_s
        self._durations_s: Mapping[str, float] = {}
        self._cells_s: Mapping[str, float] = {}
        self._planned: Mapping[str, str] = {}
        self._started_s: dict[str, float] = {}
        self._ended = 0
        self._failed: dict[str, None] = {}
        self._failures = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def begin(self, planned: Mapping[str, str], durations_s: Mapping[str, float], cells_s: Mapping[str, float]) -> None:
        """Write the estimate, and start writing lines.

        `planned` has the ids of all cases by node id, `durations_s` the durations of cases in earlier sessions by id,
        `cells_s` those of cells in the lock file of the matrix by id.
        """
        self._planned, self._durations_s, self._cells_s = planned, durations_s, cells_s
        self._write(self.estimate())
        threading.Thread(target=self._run, name="conformance-progress", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep the start time of a case."""
        with self._lock:
            self._started_s[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case that has ended, or whose worker died."""
        result = getattr(report, "conformance", None)
        if result is None and report.when in ("setup", "call", "teardown"):
            return
        with self._lock:
            self._started_s.pop(report.nodeid, None)
            self._ended += 1
            if result is None or result["verdict"] in BAD:
                self._failures += 1
                self._failed[self._case(report.nodeid).partition("/")[0]] = None

    def pytest_unconfigure(self) -> None:
        """End the lines."""
        self._over.set()

    def estimate(self) -> str:
        """Return the plan, with its duration in earlier sessions, or when the lock file of the matrix was written."""
        cells = {case.partition("/")[2] for case in self._planned.values()}
        if (known_s := self._known_s(self._planned.values())) is not None:
            takes = f"about {_duration_text(STARTUP_S + known_s)}, as before"
        elif cells <= self._cells_s.keys():
            all_s = STARTUP_S + sum(self._cells_s[cell] for cell in cells)
            takes = f"about {_duration_text(all_s)} on two processors (matrix.lock)"
        else:
            takes = "no earlier session tells how long"
        return f"{counted(len(self._planned), 'case')} on {counted(len(cells), 'cell')}: {takes}"

    def line(self, now_s: float) -> str:
        """Return the progress at a time of `time.monotonic`."""
        with self._lock:
            running, ended = dict(self._started_s), self._ended
            failed, failures = list(self._failed), self._failures
        laws = ", ".join(failed[:_NAMED_LAWS]) + (", ..." if failed[_NAMED_LAWS:] else "")
        text = (
            f"{ended} of {counted(len(self._planned), 'case')} ended, {failures} failed{f' ({laws})' if laws else ''}"
        )
        if running:
            longest = min(running, key=running.__getitem__)
            text += f"; running longest: {self._case(longest)}, {now_s - running[longest]:.0f} s"
        return text

    def _known_s(self, cases: Collection[str]) -> float | None:
        known_s = [self._durations_s[case] for case in cases if case in self._durations_s]
        return sum(known_s) / self._workers if len(known_s) >= _KNOWN_SHARE * max(1, len(cases)) else None

    def _case(self, nodeid: str) -> str:
        return self._planned.get(nodeid, nodeid)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._write(f"\n{self.line(time.monotonic())}")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more
            self._out.write(f"{text}\n")
            self._out.flush()


def _duration_text(duration_s: float) -> str:
    return f"{duration_s:.0f} s" if duration_s < 100 else f"{duration_s / 60:.0f} min"
