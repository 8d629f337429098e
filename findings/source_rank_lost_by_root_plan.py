"""parallelize_module ignores `src_data_rank` for entries of a plan under the empty name, which is that of the module.

The call for this entry (torch/distributed/tensor/parallel/api.py) does not pass the argument on, as the others do:
weights come from rank 0, and are broadcast although None asks for no communication.

severity: low
visible: silent
training: weights that another rank has loaded are replaced by those of rank 0
thread: none known
law: TP-3
avoid: name the modules in the plan, or pass the style itself
ranks: 2
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
layer = nn.Linear(2, 2, bias=False)
nn.init.constant_(layer.weight, dist.get_rank())
try:
    parallelize_module(layer, mesh, {"": ColwiseParallel()}, src_data_rank=1)
except TypeError as error:
    print(f"TypeError: {error}", flush=True)
    sys.exit(2)
expected, got = 1.0, layer.weight.full_tensor()[0, 0].item()
if dist.get_rank() == 0:
    print(f"expected the weights of rank 1, which are {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
