"""An operator with out= writes the whole result into a pending sum, and a tensor that shares its memory is too large.

`torch.maximum(x.detach(), y, out=x.detach())` relabels the tensor that is given as a copy (replicated) where pointwise
operators of torch/distributed/tensor/_ops/_pointwise_ops.py gather pending sums. `x` itself is a pending sum still.

severity: low
visible: silent
training: buffers that are written with out= through views are too large by the number of ranks
thread: none known
law: DT-3
avoid: assign the result instead of out=
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = DTensor.from_local(torch.ones(2), mesh, [Partial()])
y = distribute_tensor(torch.full((2,), 5.0), mesh, [Replicate()])
expected, status = torch.full((2,), 5.0), 2
try:
    torch.maximum(x.detach(), y, out=x.detach())
    got = x.full_tensor()
    status = int(not torch.equal(got, expected))
except RuntimeError as error:
    got = f"refused: {str(error).splitlines()[0]}"
if dist.get_rank() == 0:
    print(f"expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
