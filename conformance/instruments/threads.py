"""Threads of this process that have work to do, as the operating system tells."""

import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")
_RUNNABLE = "R"


def runnable_threads() -> int:
    """Return the number of this process's other threads that run or wait for a processor; 0 where no `/proc` tells."""
    own = str(threading.get_native_id())
    return sum(_state(task) == _RUNNABLE for task in _TASKS.glob("[0-9]*") if task.name != own)


def _state(task: Path) -> str:
    """Return the letter for a thread's state (proc(5)), nothing for a thread that has ended."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""
