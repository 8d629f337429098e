"""Storages that a run holds, with the line that allocated them."""

from pathlib import Path

import torch
from torch import Tensor

from conformance.instruments.held_storages import HeldStorages, Moment


def moments(*, kept: list[Tensor]) -> list[Moment]:
    storages = HeldStorages(watched=[1])
    with storages.listening():
        for step in range(2):
            storages.phase("forward", step=step)
            kept.append(torch.zeros(16))
            held = torch.ones(64)
            held.add_(1.0)
            view = held[:8]
            del held, view
            storages.phase("idle", step=step)
    return storages.moments


def test_peak_and_end_of_each_phase_have_the_storages_that_are_alive() -> None:
    kept: list[Tensor] = []
    peak, rest, idle, _ = moments(kept=kept)
    assert [(m.step, m.phase, m.kind) for m in (peak, rest)] == [(1, "forward", "peak"), (1, "forward", "rest")]
    assert (peak.nbytes, rest.nbytes, idle.phase) == (2 * 64 + 256, 2 * 64, "idle")


def test_a_storage_has_the_line_and_the_step_that_allocated_it() -> None:
    kept: list[Tensor] = []
    rest = moments(kept=kept)[1]
    assert {(Path(site.file).name, site.function, site.step) for site in rest.held} == {
        ("test_held_storages.py", "moments", 0),
        ("test_held_storages.py", "moments", 1),
    }
    assert {site.operator for site in rest.held} == {"aten::zeros"}


def test_a_resized_storage_counts_with_its_bytes() -> None:
    storages = HeldStorages(watched=[0])
    with storages.listening():
        storages.phase("forward", step=0)
        tensor = torch.zeros(16)
        tensor.untyped_storage().resize_(0)
        storages.phase("backward", step=0)
    assert [moment.nbytes for moment in storages.moments if moment.kind == "rest"] == [0, 0]
