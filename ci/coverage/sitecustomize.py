"""On PYTHONPATH, this measures coverage in every Python process that starts or is forked: see ../coverage.sh."""

import gc
import os

import coverage

coverage.process_startup()
_collect = gc.collect


def _save_and_collect(*arguments: int) -> int:
    """A rank collects garbage at the end of each task; when its pool ends, it is killed without a word."""
    current = coverage.Coverage.current()
    if current is not None and "RANK" in os.environ:
        current.save()
    return _collect(*arguments)


gc.collect = _save_and_collect
