"""A full state dict cannot be loaded with FSDP2 and tensor parallelism if a dimension is not divisible by all ranks.

`set_model_state_dict` with `full_state_dict=True` raises AssertionError on 2 x 2 ranks for a column-wise layer of ten
rows: `_StridedShard._shard_tensor` splits five rows into three and two and requires equal shapes, although
`get_model_state_dict` has made this state dict. Eight rows work, and so does `broadcast_from_rank0=True`.

severity: medium
visible: loud
training: a checkpoint that was just saved cannot be loaded
thread: none known
law: CKPT-4
avoid: load with broadcast_from_rank0=True, or choose sizes that all ranks divide
ranks: 4
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
options, status = StateDictOptions(full_state_dict=True), 0
for rows in (8, 10):
    model = nn.Sequential(nn.Linear(8, rows))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = get_model_state_dict(model, options=options)
    try:
        set_model_state_dict(model, state, options=options)
        got = "no error"
    except AssertionError as error:
        got, status = repr(error), 1
    if dist.get_rank() == 0:
        print(f"{rows} rows: expected no error, got {got}")
dist.destroy_process_group()
sys.exit(status)
