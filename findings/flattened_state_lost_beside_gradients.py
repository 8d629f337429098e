"""A flattened state of an optimizer is not loaded if the model has gradients and has not stepped; there is no error.

Gradients keep `_init_optim_state` (torch/distributed/checkpoint/state_dict.py) from making state, and
`_unflatten_optim_state_dict` takes what the optimizer already has state for, which is nothing.

severity: medium
visible: silent
training: a run that loads its optimizer after a warm-up backward, or after an overflow, begins with empty moments
thread: https://github.com/mosaicml/composer/pull/3226
law: CKPT-10
avoid: set gradients to None before the state is loaded, or do without flatten_optimizer_state_dict
ranks: 1
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group("gloo", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a backward pass."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = training()
optimizer.step()
state = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
model, optimizer = training()
state_dict.set_optimizer_state_dict(model, optimizer, state, options=options)
loaded = sum(map(bool, optimizer.state.values()))
print(f"torch {torch.__version__}: expected the state of 2 parameters, got that of {loaded}")
dist.destroy_process_group()
sys.exit(int(loaded != 2))
