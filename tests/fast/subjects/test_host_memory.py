"""Memory of the CPU when a phase ends and other threads still hold tensors."""

import threading
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.threads import runnable_threads
from conformance.subjects.memory_log import HostMemory

BUSY = bytes(range(256)) * 40_000
"""Bytes whose compression takes a thread many milliseconds, without the interpreter's lock."""


def test_a_tensor_that_a_busy_thread_is_about_to_drop_is_waited_for() -> None:
    """The thread stands for one of gloo that has told the end of an operator, and that a busy machine holds up."""
    memory = HostMemory()
    with memory.installed(), DispatchTap([], outcomes=memory.listeners):
        held = [torch.ones(36)]
        assert memory.held_bytes == 144

        def drop(tensors: list[Tensor]) -> None:
            zlib.compress(BUSY, 9)
            tensors.clear()

        thread = threading.Thread(target=drop, args=(held,))
        thread.start()
        memory.settle()
        assert memory.held_bytes == 0
        thread.join()


def test_a_tensor_that_a_waiting_thread_holds_is_left() -> None:
    memory, end = HostMemory(), threading.Event()
    with memory.installed(), DispatchTap([], outcomes=memory.listeners):
        thread = threading.Thread(target=lambda _held: end.wait(), args=(torch.ones(36),))
        thread.start()
        memory.settle()
        assert memory.held_bytes == 144
        end.set()
        thread.join()


def test_no_thread_is_runnable_where_nothing_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("conformance.instruments.threads._TASKS", tmp_path / "none")
    assert runnable_threads() == 0
