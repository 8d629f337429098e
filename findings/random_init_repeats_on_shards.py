"""torch.nn.init on a sharded parameter gives each shard the same numbers on a mesh of CPUs.

DTensor keeps offsets into the sequence of random numbers on accelerators alone; on a mesh of CPUs every rank samples
from the same state.

severity: medium
visible: silent
training: a model that is initialised on the CPU has repeated rows
thread: https://github.com/pytorch/pytorch/issues/168058
law: INIT-8
avoid: initialise full tensors and distribute them, or initialise on the accelerator
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
with torch.device("meta"):
    model = nn.Linear(4, 4, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model.to_empty(device="cpu")
torch.manual_seed(0)
nn.init.normal_(model.weight)
rows = model.weight.full_tensor()
same = torch.equal(rows[:2], rows[2:])
if dist.get_rank() == 0:
    print(f"expected rows of rank 0 and rank 1 that differ, got {'the same' if same else 'different'} numbers\n{rows}")
dist.destroy_process_group()
sys.exit(int(same))
