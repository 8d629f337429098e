"""`view(-1)` of a weight whose columns FSDP and tensor parallelism have sharded gives its numbers in another order.

The result is (_StridedShard(0), _StridedShard(0)), and puts the chunks of the two mesh dimensions together in the wrong
order: `full_tensor()` and every operator that redistributes it are wrong, such as `torch.cat`.

severity: high
visible: silent
training: optimizers that flatten parameters, such as LBFGS, step with numbers of other elements
thread: none known
law: MESH-3
avoid: shard by FSDP along another dimension than by tensor parallelism, or flatten full tensors
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
full = torch.arange(32.0).view(4, 8)
linear = nn.Linear(8, 4, bias=False)
linear.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(1)]))
fully_shard(linear, mesh=mesh["dp"], shard_placement_fn=lambda parameter: Shard(1))
try:
    flat = linear.weight.detach().view(-1)
    assert isinstance(flat, DTensor)
    got, expected = flat.full_tensor().tolist(), full.view(-1).tolist()
    text, status = f"{got[:8]}", int(got != expected)
except (RuntimeError, NotImplementedError) as error:
    text, status = f"refused: {str(error).splitlines()[0][:100]}", 2
if dist.get_rank() == 0:
    print(f"expected {full.view(-1)[:8].tolist()}, got {text}", flush=True)
dist.destroy_process_group()
sys.exit(status)
