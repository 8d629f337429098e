"""A state dict of one submodule without frozen parameters cannot be taken: `get_model_state_dict` raises KeyError.

It keeps the keys of the submodule alone, and then removes those of all frozen parameters of the model, which are not
there any more (`_get_model_state_dict` in torch/distributed/checkpoint/state_dict.py).

severity: low
visible: loud
training: a run that trains one module beside a frozen one cannot save it so
thread: none known
law: CKPT-10
avoid: take the state of the whole model, and keep the keys of the submodule
ranks: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[1].requires_grad_(False)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
options = StateDictOptions(ignore_frozen_params=True)
try:
    state = get_model_state_dict(model, submodules={model[0]}, options=options)
    got, status = f"{[*state]}", int([*state] != ["0.weight", "0.bias"])
except KeyError as error:
    got, status = repr(error), 1
print(f"torch {torch.__version__}: expected ['0.weight', '0.bias'], got {got}")
dist.destroy_process_group()
sys.exit(status)
