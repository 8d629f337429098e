"""Loading a full state dict reports no missing key, with `strict=False`, and raises no error, with `strict=True`.

`set_model_state_dict` adds the model's own state to the state dict before it loads it (`_load_model_state_dict` in
torch/distributed/checkpoint/state_dict.py, `state_dict.update(local_state_dict)`), so that no key is missing.
Parameters that a truncated checkpoint lacks keep their initial values.

severity: medium
visible: silent
training: a run that loads a checkpoint without some weights goes on with their initial values
thread: none known
law: none
avoid: compare the keys of the state dict with those of the model before it is loaded
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
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
options = StateDictOptions(full_state_dict=True, strict=True)
state = get_model_state_dict(model, options=options)
del state["bias"]
try:
    set_model_state_dict(model, state, options=options)
    got, status = "no error", 1
except RuntimeError as error:
    got, status = f"RuntimeError: {str(error).splitlines()[-1].strip()}", 0
print(f"torch {torch.__version__}: expected an error that names the missing key, got {got}")
dist.destroy_process_group()
sys.exit(status)
