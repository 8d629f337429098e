"""Functions that tests run in ranks with the simulated device."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.experiments.context import start_process_group
from conformance.run.ranks.messages import RankContext

PEER_SLEEPS_S = 30.0


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
