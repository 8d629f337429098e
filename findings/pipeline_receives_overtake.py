"""Pipelines of halved backwards compute on tensors of other micro-batches if receives are deferred, by `defer_pp_recv`.

Receives are moved behind computations (`_defer_recv_ops` in torch/distributed/pipelining/schedules.py), and past other
receives from the same rank, although sends and receives of two ranks are matched in their order alone. DualPipeV does
the same on four ranks.

severity: high
visible: silent
training: outputs, losses and gradients are those of mixed micro-batches and stages
thread: none known
law: PP-6
avoid: leave defer_pp_recv out
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank = dist.get_rank()


def outputs(*, defer: bool) -> torch.Tensor | None:
    """Return the outputs of four stages, each of which adds its number, of micro-batches of different inputs."""
    stages = []
    for index in (rank, 3 - rank):
        layer = nn.Linear(1, 1)
        nn.init.ones_(layer.weight)
        nn.init.constant_(layer.bias, 10.0**index)
        stages.append(PipelineStage(layer, index, 4, torch.device("cpu")))
    schedule = ScheduleZBVZeroBubble(
        stages, MICRO_BATCHES, loss_fn=lambda out, _: out.sum(), scale_grads=False, defer_pp_recv=defer
    )
    batch = torch.arange(float(MICRO_BATCHES)).view(-1, 1)
    return schedule.step(batch, target=batch) if rank == 0 else schedule.step()


expected, got = outputs(defer=False), outputs(defer=True)
if rank == 0:
    print(f"expected {expected.flatten().tolist()}, got {got.flatten().tolist()}: outputs of micro-batches", flush=True)
dist.destroy_process_group()
sys.exit(int(rank == 0 and not torch.equal(expected, got)))
