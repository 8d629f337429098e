"""Functions that tests run in ranks with the simulated device."""

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from conformance.experiments import context as experiments_context
from conformance.experiments.context import start_process_group
from conformance.run.ranks.messages import RankContext
from conformance.sweeps import operator_sweep, optimizers, options, parallel_styles, trials

PEER_SLEEPS_S = 30.0
LIMIT_S = 60.0
EXPERIMENTS = {
    each.name: each
    for each in (
        operator_sweep.sweep,
        optimizers.sweep,
        parallel_styles.sweep,
        parallel_styles.compiled_sweep,
        options.sweep,
    )
}


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


def sweep(context: RankContext, payload: dict[str, Any]) -> Any:
    """Sweep some subjects, with time limits that no call of a busy machine reaches."""
    limits = patch.object(trials, "_WAIT_LIMITS_S", (LIMIT_S, LIMIT_S))
    subjects = patch.object(experiments_context, "subjects_of", lambda _: frozenset(payload["subjects"]))
    with limits, subjects:
        return EXPERIMENTS[payload["experiment"]](context, payload["job"])
