"""A model of FSDP2 that is evaluated in `torch.inference_mode` before its first training step cannot be trained.

FSDP makes the buffers of gathered parameters at the first forward and keeps them (`FSDPParam.init_all_gather_outputs`):
made in inference mode, they are inference tensors for ever, and the next all-gather outside, or backward, refuses them.
On one rank the evaluation itself raises up to torch 2.14.

severity: medium
visible: loud
training: the first step raises after an evaluation, such as the check that some trainers run before training
thread: https://github.com/pytorch/pytorch/pull/197327
law: API-1
avoid: evaluate under `torch.no_grad`, or train a step first
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
with torch.inference_mode():
    model(torch.ones(1, 4))
got = "none"
try:
    model(torch.ones(1, 4)).sum().backward()
except RuntimeError as error:
    got = str(error).splitlines()[0]
if dist.get_rank() == 0:
    print(f"expected no error, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != "none"))
