"""Start-up code that measures coverage in every process with this directory on PYTHONPATH, see ../coverage.sh."""

import gc
import os

import coverage

coverage.process_startup()
_collect = gc.collect


def _save_and_collect(*arguments: int) -> int:
    """Save the data at the end of each task, when a rank collects garbage: later the pool kills the rank."""
    current = coverage.Coverage.current()
    if current is not None and "RANK" in os.environ:
        current.save()
    return _collect(*arguments)


gc.collect = _save_and_collect
