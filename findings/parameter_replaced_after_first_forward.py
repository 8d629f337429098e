"""A parameter that replaces one of an FSDP2 module after the first forward is dropped: forward uses the old one.

`FSDPParam.reset_sharded_param` looks at the parameters of the module once, before the first forward. Later the next
unshard and reshard of the group register the old parameter again.

severity: high
visible: silent
training: a resized, reset, pruned or merged weight is lost, while an optimizer that has it steps it in vain
thread: https://github.com/pytorch/pytorch/issues/157391
law: LIFE-1
avoid: write into the parameter in place, or use load_state_dict with assign=True
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
model = nn.Linear(1, 1, bias=False)
nn.init.ones_(model.weight)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
x = torch.ones(1, 1)
model(x).sum().backward()
model.weight = nn.Parameter(model.weight.detach() * 5)
expected, got = 5.0, model(x).item()
if dist.get_rank() == 0:
    print(f"expected an output of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
