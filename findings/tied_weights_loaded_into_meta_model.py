"""A full state dict that is loaded into a model on the meta device unties its weights.

`set_model_state_dict` replaces the parameters on meta by new ones, one for each name, as `load_state_dict(assign=True)`
does, although nobody asked for that: a head that shared the embedding's weight has its own from then on.

severity: medium
visible: silent
training: the two weights are trained apart, the second of them by no optimizer that was made before
thread: https://github.com/verl-project/verl/issues/7834
law: CKPT-10
avoid: to_empty before loading, or tie the weights again before the optimizer is made
ranks: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1"))
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def tied(device):
    """Return a sharded model with one weight under two names."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return fully_shard(model, mesh=mesh)


options = StateDictOptions(full_state_dict=True)
model = tied("meta")
set_model_state_dict(model, get_model_state_dict(tied("cpu"), options=options), options=options)
count = len([*model.parameters()])
print(f"torch {torch.__version__}: expected 1 parameter, got {count}")
dist.destroy_process_group()
sys.exit(int(count != 1))
