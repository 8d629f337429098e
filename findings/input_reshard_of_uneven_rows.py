"""`input_reshard` gathers saved tensors wrongly where ranks do not share them equally.

`_unpack_hook_tp` (torch/distributed/tensor/parallel/input_reshard.py) makes a DTensor of a shard without its full
shape, as if all ranks had equal ones, and tells which tensors were sharded by the number of elements of the shard.

severity: medium
visible: loud
training: backward stops where the sequence is no multiple of the tensor-parallel ranks
thread: none known
law: none
avoid: pad the sequence to a multiple of the ranks
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel.input_reshard import input_reshard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
layer = nn.Linear(4, 4, bias=False)
nn.init.ones_(layer.weight)
x = torch.ones(3, 4)
input_reshard(layer, mesh, 0)
expected = torch.full((4, 4), 3.0)
try:
    layer(x).sum().backward()
    got = layer.weight.grad
    status = int(not torch.equal(got, expected))
except RuntimeError as error:
    got, status = f"{type(error).__name__}: {str(error)[:80]}", 1
if dist.get_rank() == 0:
    print(f"expected gradients of 3, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(status)
