"""A full state of an optimizer cannot be loaded between the first backward and the first step of a model.

Gradients keep `_init_optim_state` (torch/distributed/checkpoint/state_dict.py) from making the state into which a full
one is distributed; `_load_optim_state_dict` then finds no device.

severity: low
visible: loud
training: a run that loads its optimizer after a warm-up backward, or after an overflow, stops
thread: https://github.com/mosaicml/composer/pull/3226
law: CKPT-10
avoid: set gradients to None before the state is loaded, or load a sharded state
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

os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("gloo", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
options = state_dict.StateDictOptions(full_state_dict=True)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a backward pass."""
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


model, optimizer = training()
optimizer.step()
state = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
model, optimizer = training()
try:
    state_dict.set_optimizer_state_dict(model, optimizer, state, options=options)
    outcome = "a loaded state"
except AssertionError as error:
    outcome = repr(error)
print(f"torch {torch.__version__}: expected a loaded state, got {outcome}")
dist.destroy_process_group()
sys.exit(int(outcome != "a loaded state"))
