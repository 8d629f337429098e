"""A flattened state of an optimizer without state, such as SGD, is loaded as an empty entry for each parameter.

`_unflatten_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) makes entries before it looks for values.

severity: low
visible: silent
training: code that asks whether a parameter has state, as some optimizers do at their first step, takes it for stepped
thread: https://github.com/pytorch/pytorch/issues/192225
law: CKPT-10
avoid: take the state without flatten_optimizer_state_dict
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
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = StateDictOptions(flatten_optimizer_state_dict=True)
state = get_optimizer_state_dict(model, optimizer, options=options)
set_optimizer_state_dict(model, optimizer, state, options=options)
print(f"torch {torch.__version__}: expected no state, got {len(optimizer.state)} entries")
dist.destroy_process_group()
sys.exit(int(len(optimizer.state) > 0))
