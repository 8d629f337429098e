"""Watchdog of the simulated device: as ProcessGroupNCCL's it ends a process that waits past a process group's limit."""

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.experiments.context import start_process_group
from conformance.run.devices.hardware import find_hardware
from conformance.run.pool import Pools, RunFailed, Task
from conformance.run.ranks.messages import RankContext
from tests.support.fake_devices import FakeDevices
from tests.support.simulated_processes import library

LIMIT_S, PEER_SLEEPS_S = 0.5, 30.0


def wait_for_a_peer(context: RankContext, payload: dict[str, Any]) -> float:
    """Let rank 0 wait for rank 1, which sleeps, in a process group with a time limit."""
    device = start_process_group(context)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=payload["limit_s"]))
    if context.rank == 1:
        time.sleep(PEER_SLEEPS_S)
    x = torch.ones(4, device=device)
    if payload["operation"] == "recv":
        dist.recv(x, 1, group=group)
    else:
        dist.all_reduce(x, group=group)
    return float(x.sum())


@pytest.mark.parametrize(("operation", "schedule"), [("all_reduce", "eager"), ("all_reduce", "lazy"), ("recv", "lazy")])
def test_a_rank_whose_peer_does_not_come_is_ended(pools: Pools, operation: str, schedule: str) -> None:
    if library() is None:
        return
    hardware = find_hardware(FakeDevices(), accelerator=f"sim:{schedule}", share_gpu="auto")
    payload = {"limit_s": LIMIT_S, "operation": operation}
    task = Task(f"{__name__}:wait_for_a_peer", payload, kind=schedule)
    with pytest.raises(RunFailed) as caught:
        pools.run(task, world_size=2, deadline_s=PEER_SLEEPS_S, env=hardware.environment("sim"))
    assert (caught.value.kind, caught.value.reason) == ("crash", "rank 0 was killed by SIGABRT")
    message = rf"\[Rank 0\] Watchdog caught collective operation timeout: WorkSim\(SeqNum=1, OpType={operation}, "
    assert re.search(rf"{message}Timeout\(ms\)=500\) ran for \d{{3,5}} milliseconds", caught.value.details())
