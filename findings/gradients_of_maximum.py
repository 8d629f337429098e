"""Gradients of amax, amin and the inf-norm of a sharded DTensor are NaN or of another size.

Their backward formulas count ties by `mask.sum(dim=[])`, which means all dimensions. `_infer_reduction_dims`
(torch/distributed/tensor/_ops/_math_ops.py) takes an empty list for no dimension unless the tensor is a scalar: the
count is each rank's own, a scalar that is said to be sharded. A rank without the maximum divides zero by zero.

severity: high
visible: silent
training: gradients are NaN, or too large where ranks share the maximum
thread: none known
law: DT-3
avoid: use max() instead of amax(), and sum() instead of sum(dim=[])
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, status = init_device_mesh("cpu", (dist.get_world_size(),)), 0
calls = {
    "amax()": torch.amax,
    "amin()": torch.amin,
    "inf-norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
}
for name, call in calls.items():
    full = torch.tensor([[4.0], [4.0], [3.0], [4.0]]).requires_grad_()
    expected = call(full)
    expected.backward()
    shards = distribute_tensor(full.detach(), mesh, [Shard(0)]).requires_grad_()
    got = call(shards)
    got.backward()
    result, gradient = got.full_tensor(), shards.grad.full_tensor()
    if dist.get_rank() == 0:
        print(f"{name}: expected {expected.item()}, {full.grad.flatten().tolist()}", end="; ")
        print(f"got {result.detach().tolist()}, {gradient.flatten().tolist()}")
    status |= int(not torch.equal(gradient, full.grad))
dist.destroy_process_group()
sys.exit(status)
