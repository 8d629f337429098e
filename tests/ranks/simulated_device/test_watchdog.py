"""Watchdog of the simulated device: as ProcessGroupNCCL's it ends a process that waits past a process group's limit."""

import re
from collections.abc import Iterator

import pytest

from conformance.run.devices.hardware import find_hardware
from conformance.run.pool import Pools, RunFailed, Task
from tests.support.fake_devices import FakeDevices
from tests.support.simulated_processes import library
from tests.support.simulated_tasks import PEER_SLEEPS_S

LIMIT_S = 0.5


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


@pytest.mark.parametrize(("operation", "schedule"), [("all_reduce", "eager"), ("all_reduce", "lazy"), ("recv", "lazy")])
def test_a_rank_whose_peer_does_not_come_is_ended(pools: Pools, operation: str, schedule: str) -> None:
    if library() is None:
        return
    hardware = find_hardware(FakeDevices(), accelerator=f"sim:{schedule}", share_gpu="auto")
    payload = {"limit_s": LIMIT_S, "operation": operation}
    task = Task("tests.support.simulated_tasks:wait_for_a_peer", payload, kind=schedule)
    with pytest.raises(RunFailed) as caught:
        pools.run(task, world_size=2, deadline_s=PEER_SLEEPS_S, env=hardware.environment("sim"))
    assert (caught.value.kind, caught.value.reason) == ("crash", "rank 0 was killed by SIGABRT")
    message = rf"\[Rank 0\] Watchdog caught collective operation timeout: WorkSim\(SeqNum=1, OpType={operation}, "
    assert re.search(rf"{message}Timeout\(ms\)=500\) ran for \d{{3,5}} milliseconds", caught.value.details())
