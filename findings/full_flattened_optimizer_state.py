"""A full optimizer state that was flattened cannot be loaded: `set_optimizer_state_dict` raises KeyError.

It unflattens the given state, and compares it with the optimizer's own, which it takes with the same options, that is
flattened (`_load_optim_state_dict` in torch/distributed/checkpoint/state_dict.py).

severity: low
visible: loud
training: a checkpoint with a full flattened state, as for other numbers of stages, cannot be resumed
thread: none known
law: CKPT-10
avoid: take the full state without flatten_optimizer_state_dict, or the flattened one sharded
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
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
state = get_optimizer_state_dict(model, optimizer, options=options)
try:
    set_optimizer_state_dict(model, optimizer, state, options=options)
    got, status = "no error", 0
except KeyError as error:
    got, status = repr(error), 1
print(f"torch {torch.__version__}: expected no error, got {got}")
dist.destroy_process_group()
sys.exit(status)
