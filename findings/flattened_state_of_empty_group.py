"""A flattened state of an optimizer that has a group without parameters cannot be loaded.

`_unflatten_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) takes the options of a group from those of
its first parameter, and a flattened state has none of a group without any; a nested state is loaded.

severity: low
visible: loud
training: a run whose optimizer has such a group, as stages of a pipeline without norms have, cannot resume
thread: none known
law: CKPT-10
avoid: take the state without flatten_optimizer_state_dict, or leave such groups out
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
optimizer = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}], lr=0.1)
options = StateDictOptions(flatten_optimizer_state_dict=True)
state = get_optimizer_state_dict(model, optimizer, options=options)
try:
    set_optimizer_state_dict(model, optimizer, state, options=options)
    outcome = "a loaded state"
except IndexError as error:
    outcome = repr(error)
print(f"torch {torch.__version__}: expected a loaded state, got {outcome}")
dist.destroy_process_group()
sys.exit(int(outcome != "a loaded state"))
