"""Postponed all-reduces of HSDP add gradients of a module that the last micro-batch leaves out to the next step's.

With `set_requires_all_reduce(False)` a micro-batch leaves sums over the shards, which the last one adds to its own and
reduces over the replicas. A group without gradients of the last micro-batch reduces nothing, and keeps its sums:
the step has no gradient of it, and a later one has both.

severity: high
visible: silent
training: modules that some micro-batches leave out, as layer drop and modality towers do, get gradients of other steps
thread: none known
law: LIFE-1
avoid: reduce every micro-batch over the replicas, or postpone all reductions by `set_requires_gradient_sync(False)`
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
nn.init.ones_(model[0].weight)
for module in (*model, model):
    fully_shard(module, mesh=mesh)
got = []
for uses in ((True, False), (True, True)):
    for index, use in enumerate(uses):
        model.set_requires_all_reduce(index == 1)
        (model if use else model[0])(torch.ones(1, 2)).sum().backward()
    gradient = model[1].weight.grad
    got.append(0.0 if gradient is None else gradient.full_tensor().sum().item())
    model.zero_grad()
expected = [8.0, 16.0]  # each of four weights has a gradient of 2 from each micro-batch that uses it
if dist.get_rank() == 0:
    print(f"expected sums of the second layer's gradients, by step, of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
