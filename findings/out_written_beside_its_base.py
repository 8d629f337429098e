"""After a matrix product with out= into one layout, the same product into another leaves a tensor as it was.

After `torch.mm(a, b, out=rows.detach())` the same call with a pending sum in place of sharded rows writes nothing into
the tensor that shares the memory of `out`. Without the first call the numbers are right.

severity: low
visible: silent
training: buffers that are written with out= through views keep old numbers
thread: none known
law: DT-3
avoid: assign the result instead of out=
ranks: 3
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
a, b = torch.arange(15.0).view(5, 3), torch.arange(21.0).view(3, 7)
tall, wide = (distribute_tensor(x, mesh, [Replicate()]) for x in (a, b))
rows = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(0)])
pending = DTensor.from_local(torch.zeros(5, 7), mesh, [Partial()])
expected, status = a @ b, 2
try:
    for x in (rows, pending):
        torch.mm(tall, wide, out=x.detach())
    got = pending.full_tensor()
    status = int(not torch.allclose(got, expected))
    text = f"{got[-1].tolist()}"
except RuntimeError as error:
    text = f"refused: {str(error).splitlines()[0]}"
if dist.get_rank() == 0:
    print(f"expected a last row {expected[-1].tolist()}, got {text}")
dist.destroy_process_group()
sys.exit(status)
