"""F.embedding with scale_grad_by_freq counts each rank's own indices: gradients of sharded batches are too large.

Each row of the gradient is divided by how often its index occurs. `embedding_dense_backward` runs on the local indices,
and the results are added: an index that occurs once on each of two ranks gets twice its gradient.

severity: medium
visible: silent
training: rows of the embedding that occur on several ranks learn as many times faster
thread: none known
law: DT-3
avoid: do without scale_grad_by_freq, or gather the indices first
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
indices, full = torch.tensor([0, 1, 0, 0]), torch.ones(2, 2).requires_grad_()
functional.embedding(indices, full, scale_grad_by_freq=True).sum().backward()
expected = full.grad[:, 0].tolist()
weight = distribute_tensor(full.detach(), mesh, [Replicate()]).requires_grad_()
try:
    result = functional.embedding(distribute_tensor(indices, mesh, [Shard(0)]), weight, scale_grad_by_freq=True)
    result.sum().backward()
    got = weight.grad.full_tensor()[:, 0].tolist()
    status = int(got != expected)
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
if dist.get_rank() == 0:
    print(f"gradients of both rows: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
