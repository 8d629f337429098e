"""Expandable segments of a device's allocator as an axis, without a device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.assertions.axes.proofs import prove
from conformance.instruments.device_memory import expandable_segments
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import ALLOCATOR_VARIABLES, Cell
from conformance.run.pool import Pools, Task, latched

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


def test_an_allocator_that_obeys_passes() -> None:
    prove("expandable_segments", record(ON, segments=True), NEIGHBOUR)
    prove("expandable_segments", record(OFF, segments=False), NEIGHBOUR)


@pytest.mark.parametrize(
    ("shown", "neighbour", "reason"),
    [
        (record(ON, segments=False), NEIGHBOUR, "expandable segments: "),
        (record(ON, segments=None), NEIGHBOUR, "expandable segments: "),
        (record(OFF, segments=True), NEIGHBOUR, "expandable segments: "),
        *(
            (record(ON, segments=True, **{name: None}), NEIGHBOUR, f"{name} is None before the device is used")
            for name in ALLOCATOR_VARIABLES
        ),
        (record(ON, segments=True), record(UNSET, segments=True, **ON.environment), "is expandable_segments:True too"),
    ],
)
def test_a_dead_value_and_a_session_that_sets_the_variables_fail(shown: Any, neighbour: Any, reason: str) -> None:
    with pytest.raises(ConformanceFailure, match=reason):
        prove("expandable_segments", shown, neighbour)


def test_expandable_segments_are_read_from_the_allocators_snapshot() -> None:
    device = torch.device("cuda")
    assert expandable_segments(torch.device("cpu")) is None
    for grows, expected in (([True, False], True), ([False], False), ([], False)):
        segments = [{"is_expandable": growing} for growing in grows]
        assert expandable_segments(device, snapshot=lambda segments=segments: segments) is expected  # type: ignore[misc]
