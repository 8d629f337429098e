"""Ledger of a device's memory, and the laws on devices, with metrics made up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from conformance.experiments.environment import DeviceSurroundings
from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.instruments.device_memory import device_ledger
from conformance.instruments.memory import mark
from conformance.laws.memory import test_mem
from conformance.laws.preconditions import test_env
from conformance.memory_segment import MemorySegment
from conformance.oracles.emulation import Emulation
from conformance.oracles.initialisation import initial_weights
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.run.devices.hardware import DETERMINISM
from reference_trainer.config import TrainerConfig
from tests.fast.oracles.test_memory_model import CELL, measured

MEBI = 1 << 20
FOREACH = CELL.but(optimizer="adamw-foreach")


class Allocator:
    """Allocator that counts as torch's does: present values, and peaks since the last reset."""

    def __init__(self) -> None:
        self.requested = self.peak = 0

    def change(self, size: int) -> None:
        self.requested += size
        self.peak = max(self.peak, self.requested)

    def reset(self) -> None:
        self.peak = self.requested

    def statistics(self) -> dict[str, int]:
        now = {"requested_bytes.all.current": self.requested, "requested_bytes.all.peak": self.peak}
        factors = {"allocated": 2, "active": 3, "reserved": 4}
        return now | {f"{kind}_bytes.all.peak": factor * self.peak for kind, factor in factors.items()}


def test_segments_of_a_device() -> None:
    allocator = Allocator()
    allocator.change(100)
    with device_ledger(allocator.statistics, reset=allocator.reset) as ledger:
        allocator.change(10)
        mark("forward")
        allocator.change(50)
        allocator.change(-40)
        mark("backward")
        allocator.change(-20)
    assert ledger.segments == [
        MemorySegment("", 0, 10, 10, 220, 330, 440),
        MemorySegment("forward", 10, 60, 20, 320, 480, 640),
        MemorySegment("backward", 20, 20, 0, 240, 360, 480),
    ]
    assert (ledger.peak_bytes, ledger.kept_bytes) == (60, 0)
    mark("nobody listens any more")
    assert len(ledger.segments) == 3


judge = test_mem.test_memory_requested_from_cuda_matches_the_model


@pytest.mark.parametrize("change", [{"forward": (MEBI, 0)}, {"backward": (-MEBI, 0)}, {"forward": (0, MEBI)}])
def test_a_phase_that_needs_something_else_fails(change: dict[str, tuple[int, int]]) -> None:
    judge(measured({}, kernels=False), FOREACH)
    with pytest.raises(ConformanceFailure, match=r"^(peak|rest) of (forward|backward)"):
        judge(measured(change, kernels=False), FOREACH)


def test_a_device_has_another_optimizer_than_the_cpu() -> None:
    """Torch steps parameter by parameter on the CPU, and by lists on a device."""
    with pytest.raises(ConformanceFailure, match="peak of optimizer of rank 0: measured"):
        judge(measured({}, kernels=False), CELL)


SOUND = DeviceSurroundings(
    foreign_processes=[],
    sees_itself=True,
    pinned={"TF32 off": True, "deterministic algorithms": True},
    cublas_workspace_bytes=1,
    nccl_buffer_bytes=1,
    free_bytes=1,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"foreign_processes": [17]}, "foreign processes: measured 1, expected 0 processes; .17."),
        ({"pinned": {"TF32 off": False}}, "knobs not pinned: measured 1, expected 0 knobs; rank 1: TF32 off"),
    ],
)
def test_a_device_that_is_shared_or_not_pinned_fails(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judging_with(monkeypatch, {"one thread": True})
    require_free_and_pinned(SOUND, SOUND)
    with pytest.raises(ConformanceFailure, match=message):
        require_free_and_pinned(SOUND, replace(SOUND, **change))


def test_a_process_that_judges_with_other_knobs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    judging_with(monkeypatch, {"one thread": True, "bf16 sums in fp32": False})
    with pytest.raises(ConformanceFailure, match="the process that judges: bf16 sums in fp32"):
        require_free_and_pinned(SOUND)
    judging_with(monkeypatch, {"one thread": True})
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(ConformanceFailure, match="the process that judges: NCCL_ALGO"):
        require_free_and_pinned(SOUND)


def test_where_processes_are_not_seen_nothing_is_said_of_them() -> None:
    with pytest.raises(Unsupported, match="ids of another namespace"):
        require_free_and_pinned(replace(SOUND, sees_itself=False))


def judging_with(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, bool]) -> None:
    """Let the emulation, which computes on a device here, report these knobs; variables are as a session sets them."""
    for name, value in DETERMINISM.items():
        monkeypatch.setenv(name, value)

    def emulate(config: TrainerConfig, masters: dict[str, Tensor], *, step: int, device: str) -> Emulation:
        assert (masters.keys(), device) == (initial_weights(config).keys(), "cuda")
        return Emulation(1.0, {}, {}, knobs=knobs)

    monkeypatch.setattr(test_env, "emulated_step", emulate)


def require_free_and_pinned(*results: DeviceSurroundings) -> None:
    measure: Any = lambda *_, **__: list(results)  # noqa: E731 - a function cannot be generic in its result here
    test_env.test_cuda_devices_are_free_and_pinned(measure, Cell())


@pytest.mark.parametrize(
    ("kind", "expected"), [("cuda", ["record all python", "dump x/s.pickle", "record None None"]), ("cpu", [])]
)
def test_a_snapshot_is_left_where_there_is_a_device(
    kind: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def record(enabled: str | None = "all", *, max_entries: int = 0, stacks: str | None = None) -> None:
        calls.append(f"record {enabled} {stacks}")

    memory = SimpleNamespace(_record_memory_history=record, _dump_snapshot=lambda file: calls.append(f"dump {file}"))
    monkeypatch.setattr(torch.cuda, "memory", memory)
    with allocator_snapshot(Path("x/s.pickle"), torch.device(kind)):
        pass
    assert calls == expected
    monkeypatch.setattr(torch.cuda, "memory", object())  # a torch without the functions
    with allocator_snapshot(Path("x/s.pickle"), torch.device(kind)):
        pass
