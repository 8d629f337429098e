"""Ending a session early: SIGTERM, which batch systems and CI send, is taken like Ctrl-C."""

import os
import signal
import threading
from contextlib import suppress
from typing import NoReturn

import psutil
import pytest
from _pytest._code import TracebackEntry


def take_sigterm_like_ctrl_c() -> None:
    """So that ranks are ended, and a partial report is left. Elsewhere than in the main thread nothing can be done."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough: what is being tidied up must not be interrupted
    raise KeyboardInterrupt(signal.Signals(number).name)


class BriefInterrupt:
    """Leaves of an interrupt's traceback the place alone: pytest renders it all, and shows no more without
    `--full-trace`, with which it is left."""

    def __init__(self, *, full: bool) -> None:
        self._full = full

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """CPython 3.11 may be interrupted where it knows no line; pytest 9.2 fails to render that, and the session."""
        known = excinfo.traceback.filter(_has_line)
        excinfo.traceback = known if self._full else known[-1:]


def _has_line(entry: TracebackEntry) -> bool:
    try:
        return entry.lineno >= 0
    except TypeError:
        return False


class EndsWorkers:
    """The controller's plugin that ends xdist's workers at once: by itself xdist waits 10 s for those that are busy."""

    @pytest.hookimpl(tryfirst=True)  # while pytest renders the traceback, they end
    def pytest_keyboard_interrupt(self) -> None:
        """Only children: a worker's ranks are its own to end."""
        for worker in psutil.Process(os.getpid()).children():
            with suppress(psutil.NoSuchProcess):
                worker.terminate()
