"""Loading of a subject's module, and whether ranks can be forks of a process that has loaded it."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that differ between ranks, or between worlds."""
_COPIES = ("__iter__", "copy")
"""Functions of `os.environ` that read all variables, as of networkx, which looks for its own among them."""
_SURVIVE_FORKS = ("jemalloc_bg_thd",)
"""Threads of libraries that a fork starts again: the allocator of pyarrow has one."""


@dataclass
class Loading:
    """Reasons for which ranks cannot be forks of a process that has loaded a module."""

    read: list[str] = field(default_factory=list)
    """Variables of ranks that were read, by the module or by one that it imports."""
    left_threads: bool = False
    left_groups: bool = False

    @property
    def is_same_on_all_ranks(self) -> bool:
        """True if each rank would load the same, and if a process that has loaded it can be forked."""
        return not self.read and not self.left_threads and not self.left_groups


@contextmanager
def noted() -> Iterator[Loading]:
    """Open a context in which a module is loaded; it notes reasons not to fork this process afterwards."""
    loading, threads = Loading(), _threads()
    environment = type(os.environ)
    original = environment.__getitem__

    def read(self: Any, key: Any) -> Any:
        if self is os.environ and key in _RANK_VARIABLES and sys._getframe(1).f_code.co_name not in _COPIES:
            loading.read.append(key)
        return original(self, key)

    with patch.object(environment, "__getitem__", read):
        yield loading
    loading.left_threads = _threads() > threads
    loading.left_groups = dist.is_initialized()


def _threads() -> int:
    """Return the number of threads of this process, those of libraries among them, that a fork would lack."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return threading.active_count()
    return sum(_name(task) not in _SURVIVE_FORKS for task in tasks.iterdir())


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return _SURVIVE_FORKS[0]
