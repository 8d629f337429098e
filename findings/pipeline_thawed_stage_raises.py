"""A pipeline whose first stage is thawed after its first step raises: the next stage sends it no gradients.

What stages pass each other, and whether it needs gradients, is learnt in the first step alone
(`_initialize_pp_stages` in torch/distributed/pipelining/schedules.py).

severity: medium
visible: loud
training: layers that are frozen at first cannot be thawed later
thread: none known
law: PP-6
avoid: make new stages and a new schedule after layers are thawed
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
layer = nn.Linear(4, 4).requires_grad_(rank > 0)
stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
x = torch.ones(4, 4)
try:
    for _ in range(2):
        _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
        layer.requires_grad_(True)
except Exception as error:
    print(f"rank {rank}: expected a step, got {type(error).__name__}: {str(error.__cause__ or error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
