"""Zero-bubble pipeline schedules compute no gradients of a stage whose inputs need none.

The first half of a backward finds parameters on the way from the stage's inputs (`stage_backward_input` in
torch/distributed/pipelining/_backward.py). Behind frozen stages inputs need no gradient, and nothing is left for the
second half. Only the first stage of the model is treated apart.

severity: high
visible: silent
training: with frozen first layers, the first stage that is trained gets no gradients, or those of some micro-batches
thread: none known
law: PP-6
avoid: another schedule, or inputs that require gradients
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank = dist.get_rank()


def gradient(schedule_type: type) -> float:
    """Return the sum of the gradient of the second of four stages, behind a frozen one."""
    modules = {index: nn.Linear(1, 1, bias=False) for index in (rank, rank + 2)}
    for index, module in modules.items():
        nn.init.ones_(module.weight)
        module.requires_grad_(index > 0)
    stages = [PipelineStage(module, index, 4, torch.device("cpu")) for index, module in modules.items()]
    schedule = schedule_type(stages, MICRO_BATCHES, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    batch = torch.ones(MICRO_BATCHES, 1)
    _ = schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    grad = modules[rank].weight.grad
    return 0.0 if grad is None else grad.sum().item()


expected, got = gradient(ScheduleInterleaved1F1B), gradient(ScheduleInterleavedZeroBubble)
print(f"rank {rank}: expected {expected:g}, got {got:g}: gradient of stage {rank} over {MICRO_BATCHES} micro-batches")
dist.destroy_process_group()
sys.exit(int(got != expected))
