"""Hooks on the activations that a pipeline stage receives stay for all later steps, and are called again in each.

A stage computes on its receive buffers, the same tensors in each step (`_retrieve_recv_activations` in
torch/distributed/pipelining/stage.py): what a forward registers on its input is still there in the next step.

severity: medium
visible: silent
training: hooks that record, clip or scale gradients of activations act once more in each step
thread: https://github.com/pytorch/pytorch/issues/185331
law: PP-6
avoid: register such hooks on a view of the input, as x.view_as(x)
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STEPS, MICRO_BATCHES = 3, 2
dist.init_process_group("gloo")
rank, calls = dist.get_rank(), []


class Hooked(nn.Linear):
    """Layer that counts the gradients of its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Register a hook on the input, and compute."""
        if x.requires_grad:
            x.register_hook(lambda _: calls.append(1))
        return super().forward(x)


stage = PipelineStage(Hooked(4, 4), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
x = torch.ones(2 * MICRO_BATCHES, 4)
got = []
for _ in range(STEPS):
    calls.clear()
    _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
    got.append(len(calls))
expected = [MICRO_BATCHES * rank] * STEPS
print(f"rank {rank}: expected {expected}, got {got}: calls of hooks in each step", flush=True)
dist.destroy_process_group()
sys.exit(int(got[1:] != expected[1:]))
