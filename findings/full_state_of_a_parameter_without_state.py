"""A full state of an optimizer cannot be loaded if the state of a parameter is there and the optimizer has none.

`_load_optim_state_dict` (torch/distributed/checkpoint/state_dict.py) fills the optimizer's own state with a given one,
and looks up where to put what is additional under names that it has not made. A parameter without gradients, such as
that of an expert without tokens, has no state. The other way round it gets an empty entry.

severity: low
visible: loud
training: a run that has begun, with unused parameters, cannot load a full state of its optimizer
thread: https://github.com/pytorch/pytorch/issues/192202
law: CKPT-10
avoid: load the state before the first step, or a sharded one
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
options = StateDictOptions(full_state_dict=True, strict=False)
state = get_optimizer_state_dict(model, source, options=options)
raised = None
try:
    set_optimizer_state_dict(model, target, state, options=options)
except KeyError as error:
    raised = error
print(f"torch {torch.__version__}: expected a state that is loaded, got {raised!r:.160}")
dist.destroy_process_group()
sys.exit(int(raised is not None))
