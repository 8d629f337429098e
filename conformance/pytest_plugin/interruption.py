"""Ending a session early: SIGTERM, which batch systems and CI send, is taken like Ctrl-C."""

import os
import signal
import threading
from contextlib import suppress
from typing import Any, NoReturn

import psutil
import pytest


def take_sigterm_like_ctrl_c() -> None:
    """Let SIGTERM end the session as Ctrl-C does, so that ranks are ended and a partial report is left.

    Elsewhere than in the main thread nothing can be done.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough: what is being tidied up must not be interrupted
    raise KeyboardInterrupt(signal.Signals(number).name)


class BriefInterrupt:
    """Cuts an interrupt's traceback to its last place.

    pytest renders all of the traceback, and shows no more than that place without `--full-trace`, which keeps it.
    """

    def __init__(self, *, full: bool) -> None:
        self._full = full

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Drop places without a line: CPython 3.11 may be interrupted there, and pytest 9.2 fails to render them."""
        known = excinfo.traceback.filter(_has_line)
        excinfo.traceback = known if self._full else known[-1:]


def _has_line(entry: Any) -> bool:
    try:
        return bool(entry.lineno >= 0)
    except TypeError:
        return False


class EndsWorkers:
    """Plugin of the controller that ends xdist's workers at once: xdist itself waits 10 s for those that are busy."""

    @pytest.hookimpl(tryfirst=True)  # while pytest renders the traceback, they end
    def pytest_keyboard_interrupt(self) -> None:
        """Terminate the children only: a worker's ranks are its own to end."""
        for worker in psutil.Process(os.getpid()).children():
            with suppress(psutil.NoSuchProcess):
                worker.terminate()
