"""A full state dict of a model that has one module under two names cannot be loaded, nor one of a compiled model.

`_iterate_valid_model_state` (torch/distributed/checkpoint/state_dict.py) visits the module once, and so
`set_state_dict` neither distributes the tensors of the second name, nor gives it the prefix of a compiled model.

severity: low
visible: loud
training: a run whose model shares a module cannot load a full state, or compiled any
thread: none known
law: CKPT-10
avoid: tie parameters instead of modules, or load a sharded state before the model is compiled
ranks: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
head = nn.Linear(4, 4)
model = nn.Sequential(head, nn.Sequential(head))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
options = StateDictOptions(full_state_dict=True)
state = get_model_state_dict(model, options=options)
raised = None
try:
    set_model_state_dict(model, state, options=options)
except RuntimeError as error:
    raised = error
print(f"torch {torch.__version__}: expected a state that is loaded, got {raised!r:.160}")
dist.destroy_process_group()
sys.exit(int(raised is not None))
