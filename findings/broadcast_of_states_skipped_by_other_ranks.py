"""`set_state_dict` hangs with the state that `get_state_dict` gave, if rank 0 alone has it.

With `full_state_dict`, `cpu_offload` and `broadcast_from_rank0` ranks other than 0 get an empty state, as documented.
`set_state_dict` takes an empty state of the model for none, and skips the broadcast of the model on these ranks: rank 0
waits.

severity: medium
visible: hang
training: loading a checkpoint hangs until the time limit of the process group
thread: none known
law: CKPT-4
avoid: call set_model_state_dict, then set_optimizer_state_dict
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())
options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
weights, state = get_state_dict(model, optimizer, options=options)
try:
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    got, status = "no error", 0
except RuntimeError as error:
    got, status = f"{type(error).__name__}: {str(error).splitlines()[0][-100:]}", 1
print(f"rank {dist.get_rank()}: expected no error, got {got}", flush=True)
sys.exit(status)
