"""Expandable segments of a device's allocator as an axis, without a device."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from conformance.assertions.axes.proofs import prove
from conformance.instruments.device_memory import expandable_segments
from conformance.judge.law import Law
from conformance.judge.support import Machine, unsupported
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import ALLOCATOR_VARIABLES, Cell
from conformance.plan.scopes import scope
from conformance.plan.substrates import CUDA, REAL
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.pool import Pools, Task, latched
from tests.support.fake_devices import some_devices

EVERYWHERE = scope("PAR-1", where="world >= 1")
ON, OFF, UNSET = (Cell(expandable_segments=value) for value in ("1", "0", "unset"))


def record(cell: Cell, *, segments: bool | None, **variables: str | None) -> Any:
    """Return a record of two ranks that obeyed the variables, except the given ones."""
    values = {name: cell.environment.get(name) for name in ALLOCATOR_VARIABLES} | variables
    ranks = [SimpleNamespace(rank=rank, variables=values, expandable_segments=segments) for rank in range(2)]
    return SimpleNamespace(cell=cell, ranks=ranks)


NEIGHBOUR = record(UNSET, segments=False)


def test_the_variables_of_both_names_are_set() -> None:
    assert ON.environment == dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
    assert OFF.environment == dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:False")
    assert UNSET.environment == {}
    assert ON.id == "dp2-fp32-default-meta-expseg1"


def test_ranks_with_other_variables_cannot_serve() -> None:
    assert latched(UNSET.environment) == ()
    assert len({latched(cell.environment) for cell in (ON, OFF, UNSET)}) == 3


def test_ranks_have_the_variables() -> None:
    task = Task("tests.support.pool_tasks:surroundings", {"names": list(ALLOCATOR_VARIABLES)})
    with Pools() as pools:
        for cell in (UNSET, ON, OFF, UNSET):
            (surroundings,) = pools.run(task, world_size=1, deadline_s=60, env=cell.environment)
            assert surroundings["env"] == {name: cell.environment.get(name) for name in ALLOCATOR_VARIABLES}


@pytest.mark.parametrize(("cell", "segments"), [(ON, True), (OFF, False)], ids=["on", "off"])
def test_an_allocator_that_obeys_passes(cell: Cell, segments: bool) -> None:
    prove("expandable_segments", record(cell, segments=segments), NEIGHBOUR)


@pytest.mark.parametrize(("cell", "segments"), [(ON, False), (ON, None), (OFF, True), (OFF, None)])
def test_an_allocator_that_does_not_fails(cell: Cell, segments: bool | None) -> None:
    with pytest.raises(ConformanceFailure, match="expandable segments: "):
        prove("expandable_segments", record(cell, segments=segments), NEIGHBOUR)


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_a_variable_that_does_not_arrive_fails(name: str) -> None:
    with pytest.raises(ConformanceFailure, match=f"{name} is None before the device is used"):
        prove("expandable_segments", record(ON, segments=True, **{name: None}), NEIGHBOUR)


def test_a_session_that_sets_the_variables_proves_nothing() -> None:
    with pytest.raises(ConformanceFailure, match="PYTORCH_ALLOC_CONF is expandable_segments:True too"):
        prove("expandable_segments", record(ON, segments=True), record(UNSET, segments=True, **ON.environment))


def test_expandable_segments_are_read_from_the_allocators_snapshot() -> None:
    device = torch.device("cuda")
    assert expandable_segments(torch.device("cpu")) is None
    for grows, expected in (([True, False], True), ([False], False), ([], False)):
        segments = [{"is_expandable": growing} for growing in grows]
        assert expandable_segments(device, snapshot=lambda segments=segments: segments) is expected  # type: ignore[misc]


@pytest.mark.parametrize("cell", [ON, OFF], ids=["on", "off"])
def test_expandable_segments_need_a_device(cell: Cell) -> None:
    law = Law("AXIS-1", "It MUST.", "", "2.6", REAL, EVERYWHERE)
    cpu = Machine(hardware=NO_DEVICES, torch_version="2.13.0", max_world_size=8)
    assert unsupported(law, cell, cpu) == "needs CUDA expandable segments; this run is on the CPU"
    gpus = msgspec.structs.replace(cpu, hardware=Hardware(devices=some_devices(2)))
    for on_gpus in (law, Law("MEM-10", "It MUST.", "", "2.6", CUDA, EVERYWHERE)):
        assert unsupported(on_gpus, cell, gpus) is None
