"""Stopwatch for the time that a process has spent training."""

import time
from contextlib import ContextDecorator


class Stopwatch(ContextDecorator):
    """Sum of the seconds between entering and leaving; as a decorator, of the calls of a function."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        self.total_s += time.monotonic() - self._start_s


TRAINING = Stopwatch()
"""Seconds that all trainers of this process have taken: building them, and their steps."""
