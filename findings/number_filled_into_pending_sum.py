"""fill_ of a DTensor that is a pending sum writes the number on each rank: the tensor is the number times the ranks.

`aten.fill_.Scalar` is listed among operators that keep any placement (torch/distributed/tensor/_ops/_tensor_ops.py),
which is right for zero alone. C++ operators write `1 - x` as `empty_like(x).fill_(1).sub_(x)`: cosine_embedding_loss of
embeddings that are sharded along their features is too large by the number of ranks minus one.

severity: high
visible: silent
training: cosine_embedding_loss, and whatever fills a pending sum, is wrong
thread: none known
law: DT-3
avoid: redistribute a pending sum before it is filled; shard embeddings along the batch
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
status, x, y, same = 0, torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]]), torch.ones(1)
try:
    filled = DTensor.from_local(torch.zeros(2), mesh, [Partial()]).fill_(1.0).full_tensor().tolist()
    given = [distribute_tensor(full, mesh, [Shard(1)]) for full in (x, y)]
    loss = functional.cosine_embedding_loss(*given, distribute_tensor(same, mesh, [Replicate()])).full_tensor()
    got = (filled, round(loss.item(), 4))
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
expected = ([1.0, 1.0], round(functional.cosine_embedding_loss(x, y, same).item(), 4))
if dist.get_rank() == 0:
    print(f"filled with 1, and loss: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status or int(got != expected))
