"""A flattened state of an optimizer is not loaded for a parameter of which the optimizer has none; there is no error.

`_unflatten_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) takes what the optimizer has state for, and
`_init_optim_state` makes none once there is any. A parameter without gradients, such as that of an expert without
tokens, has none. If the given state lacks it instead, dictionaries take the place of tensors.

severity: medium
visible: silent
training: a run that loads its optimizer after it has begun loses the moments of parameters that were not yet used
thread: https://github.com/pytorch/pytorch/issues/192224
law: CKPT-10
avoid: load the state before the first step, or do without flatten_optimizer_state_dict
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
for optimizer, count in ((source, 2), (target, 1)):
    for index, p in enumerate(model.parameters()):
        p.grad = torch.ones_like(p) if index < count else None
    optimizer.step()
    optimizer.zero_grad()
options = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
state = get_optimizer_state_dict(model, source, options=options)
set_optimizer_state_dict(model, target, state, options=options)
lost = [index for index, p in enumerate(model.parameters()) if not target.state[p]]
print(f"torch {torch.__version__}: expected the state of both parameters, got none of {lost}")
dist.destroy_process_group()
sys.exit(int(bool(lost)))
