"""The line of progress in a terminal: cases done, running and waiting for devices, and how long it may still take.

It stands above the cursor and is drawn again in its place, since pytest counts what is written to the cursor's line.
"""

import time
from collections.abc import Generator, Sequence

import pytest
from tqdm import tqdm

from conformance.run.devices.leases import waiting

_COLUMNS = 78
_UP_AND_CLEAR = "\x1b[1A\r\x1b[2K"


class ProgressLine:
    """Instead of pytest's dots. Does nothing where output is no terminal, or more than the usual is asked for."""

    def __init__(self) -> None:
        self._writer: pytest.TerminalReporter | None = None
        self._start_s = time.monotonic()
        self._total = 0
        self._done = 0
        self._drawn = False
        self._running: set[str] = set()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and reporter.isatty and session.config.get_verbosity() == 0:
            self._writer = reporter

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, Sequence[object], Sequence[object]]:
        """Counted as pytest counts it, without a mark for each."""
        category, *marks = yield
        return (category, "", "") if self._writer else (category, *marks)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = self._total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)
        self._draw()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        if self._writer is None:
            return
        elapsed_s = time.monotonic() - self._start_s
        now = f"{len(self._running)} running, {waiting()} waiting for devices"
        layout = f"{{n_fmt}}/{{total_fmt}} cases {{bar}} {now}, {{remaining}} left"
        line = tqdm.format_meter(self._done, self._total, elapsed_s, ncols=_COLUMNS, bar_format=layout)
        self._writer.write((_UP_AND_CLEAR if self._drawn else "\n") + line + "\n", flush=True)
        self._drawn = True
