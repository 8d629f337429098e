"""An evaluation of a pipeline divides the gradients that are there by the number of micro-batches.

`eval` is a step without backward, and each step ends with `scale_grads` (`perform_reduce_grad` in
torch/distributed/pipelining/stage.py), whether it has added gradients or not.

severity: high
visible: silent
training: an evaluation between backward and the optimizer's step divides gradients by the number of micro-batches
thread: none known
law: PP-6
avoid: evaluate after the optimizer's step only, or scale_grads=False and a loss that is divided
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
layer = nn.Linear(4, 4)
stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
x = torch.arange(32.0).view(8, 4) / 32
_ = schedule.step(x) if rank == 0 else schedule.step(target=x)
before = layer.weight.grad.norm().item()
with torch.no_grad():
    _ = schedule.eval(x) if rank == 0 else schedule.eval(target=x)
factor = layer.weight.grad.norm().item() / before
print(f"rank {rank}: expected 1, got {factor:.4f}: gradient after an evaluation over that before it", flush=True)
dist.destroy_process_group()
sys.exit(int(abs(factor - 1) > 1e-6))
