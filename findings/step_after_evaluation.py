"""After an evaluation the root of an FSDP2 model stays unsharded: a step, or freezing, does not reach it.

Forward leaves the root's parameters unsharded for a backward that an evaluation does not have. What changes the sharded
ones before the next backward, as an optimizer's step does, is not seen by the next forward, and `requires_grad` of the
unsharded ones is forgotten by the next reshard.

severity: high
visible: silent
training: an evaluation between backward and step lets the next forward use old weights; freezing the root is lost
thread: https://github.com/pytorch/pytorch/issues/157391
law: LIFE-1
avoid: call reshard() of the root after an evaluation, or fully_shard the root with reshard_after_forward=True
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
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
x = torch.ones(1, 1)
model(x).sum().backward()
with torch.no_grad():
    model(x)
    optimizer.step()
    got = [model(x).item()]
model.requires_grad_(False)
model.reshard()
got.append(float(model.weight.requires_grad))
expected = [-3.0, 0.0]
if dist.get_rank() == 0:
    print(f"expected an output after the step, and requires_grad, of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
