"""FSDP2 divides gradients twice by a custom factor if parameters have one shard and reductions are sums or fp16.

In `foreach_reduce` the branch for a shard group of one rank divides, and `_div_if_needed` divides again. A mesh of N
replicas and one shard is such a group, and so is a single rank.

severity: medium
visible: silent
training: gradients are too small by the factor
thread: none known
law: API-2
avoid: use DDP or one replica of N shards instead of N replicas of one shard, or no custom factor
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
expected, status = dist.get_world_size() * 64 / 4.0, 0
for sums, dtype in ((False, None), (True, None), (False, torch.float16)):
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if not hasattr(model, "set_force_sum_reduction_for_comms") or not hasattr(model, "set_gradient_divide_factor"):
        print("refused: this torch has no set_gradient_divide_factor or set_force_sum_reduction_for_comms")
        sys.exit(2)
    model.set_force_sum_reduction_for_comms(sums)
    model.set_gradient_divide_factor(4.0)
    model(torch.full((1, 2), 64.0)).sum().backward()
    got = model.weight.grad.full_tensor()[0, 0].item()
    status |= int(got != expected)
    if dist.get_rank() == 0:
        print(f"sums {sums}, reduction in {dtype}: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
