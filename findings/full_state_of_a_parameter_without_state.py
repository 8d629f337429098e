"""A full state of an optimizer cannot be loaded if the state of a parameter is there and the optimizer has none.

`_load_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) looks up where to put additional state under names
that it has not made. An expert without tokens has no state. The other way round it gets an empty entry.

severity: low
visible: loud
training: a run with unused parameters cannot load a full state of its optimizer once it has begun
thread: https://github.com/pytorch/pytorch/issues/192202
law: CKPT-10
avoid: load the state before the first step, or a sharded one
ranks: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
source, target = (torch.optim.AdamW(model.parameters()) for _ in range(2))
for optimizer, unused in ((source, None), (target, model[1].weight)):
    for p in model.parameters():
        p.grad = None if p is unused else torch.ones_like(p)
    optimizer.step()
options = StateDictOptions(full_state_dict=True, strict=False)
try:
    set_optimizer_state_dict(model, target, get_optimizer_state_dict(model, source, options=options), options=options)
    got, status = "no error", 0
except KeyError as error:
    got, status = repr(error), 1
print(f"torch {torch.__version__}: expected no error, got {got}")
dist.destroy_process_group()
sys.exit(status)
