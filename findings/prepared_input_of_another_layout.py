"""PrepareModuleInput leaves a DTensor in another layout than it declares if declared and desired layouts are equal.

`_prepare_input_arg` (torch/distributed/tensor/parallel/style.py) compares the declared layout with the desired one, and
not that of the tensor, whose check is commented out.

severity: medium
visible: silent
training: with use_local_output=True the module computes with other elements than the plan says, such as all for a shard
thread: none known
law: TP-3
avoid: redistribute inputs to the declared layout, or pass plain shards
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=True)
module = parallelize_module(nn.Identity(), mesh, style)
x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
expected, got = 4 // dist.get_world_size(), len(module(x))
if dist.get_rank() == 0:
    print(f"expected that the module gets {expected} of 4 elements, it gets {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
