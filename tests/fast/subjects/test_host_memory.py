"""Memory of the CPU when a phase ends and other threads still hold tensors."""

import threading
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.threads import runnable_threads
from conformance.subjects.memory_log import HostMemory, MemoryLog

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


@cache
def mask(size: int) -> Tensor:
    """Tensor that the first call makes, and later ones find."""
    return torch.ones(size, size).tril()


class Kept(nn.Module):
    """Module that keeps tensors for its next call, in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.tables: dict[str, tuple[Tensor, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.tables["angles"] = torch.arange(7.0).cos(), torch.arange(7.0).sin()
        return x * self.scale * mask(7)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_what_is_kept_for_the_next_call_counts_as_a_buffer_unless_it_holds_a_graph(keeps_graph: bool) -> None:
    mask.cache_clear()
    log = MemoryLog(torch.device("cpu"))
    with log.memory.installed(), log.listening():
        model = Kept()
        optimizer = SGD(model.parameters(), lr=0.1)
        log.hold(model, optimizer, step=-1)
        output = model(torch.ones(7))
        if keeps_graph:
            model.tables["output"] = (output,)
        del output
        log.hold(model, optimizer, step=0)
    built, step = log.facts().held
    assert (built.other_bytes, step.known_bytes["buffers"]) == (0, 4 * (7 + 7 + 49))
    assert (step.other_bytes > 0) == keeps_graph
