"""Gradients of two steps of a pipeline schedule before the optimizer are 1.25 times those of one, instead of twice.

`scale_grads` of torch/distributed/pipelining/stage.py divides the gradients of a stage by the number of micro-batches
at the end of each step, whatever was there before.

severity: high
visible: silent
training: with gradient accumulation around a pipeline the last step counts nearly alone, 1.25 times instead of twice
thread: https://github.com/pytorch/torchtitan/issues/1733
law: PP-6
avoid: give the schedule all micro-batches in one step, or scale_grads=False and a loss that is divided
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
x, target = torch.arange(32.0).view(8, 4) / 32, torch.ones(8, 1)
norms = []
for steps in (1, 2):
    torch.manual_seed(0)
    layer = (nn.Linear(4, 4), nn.Linear(4, 1))[rank]
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(steps):
        _ = schedule.step(x) if rank == 0 else schedule.step(target=target)
    norms.append(layer.weight.grad.norm().item())
factor = norms[1] / norms[0]
print(f"rank {rank}: expected 2 times the gradient of one step, got {factor:.4f}", flush=True)
dist.destroy_process_group()
sys.exit(int(abs(factor - 2) > 1e-4))
