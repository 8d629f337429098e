"""Assigning `.data` of a parameter that is a DTensor changes nothing, without an error.

The assignment replaces the memory of the wrapper, and leaves the local shard, in which the numbers are.

severity: high
visible: silent
training: initialisation, averaged weights and quantised weights that are written by `.data` never arrive
thread: https://github.com/pytorch/pytorch/issues/157391
law: LIFE-1
avoid: write in place, with copy_
ranks: 2
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
model = nn.Linear(2, 2, bias=False)
nn.init.ones_(model.weight)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model.weight.data = model.weight.data * 5
expected, got = 5.0, model.weight.full_tensor()[0, 0].item()
if dist.get_rank() == 0:
    print(f"expected a weight of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
