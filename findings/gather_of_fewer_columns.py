"""gather, and scatter_add of more sources than indices, along sharded columns of two sizes take other elements.

Their strategies shard all arguments along a dimension that is not the one of the indices, without asking whether it has
one size in all of them (torch/distributed/tensor/_ops/_tensor_ops.py, gather_strategy and scatter_add_strategy): each
rank takes the first of its own columns, which are others than those of its indices.

severity: high
visible: silent
training: numbers and gradients of other elements, as of logits that are gathered for the first tokens alone
thread: none known
law: DT-3
avoid: narrow the tensor to the size of the indices first
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, statuses = init_device_mesh("cpu", (dist.get_world_size(),)), []
index = torch.zeros(2, 4, dtype=torch.int64)
calls = {
    "gather": (lambda x, i: x.gather(0, i), (torch.arange(18.0).view(3, 6), index)),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), (torch.zeros(3, 4), index, torch.arange(12.0).view(2, 6))),
}
for name, (call, arguments) in calls.items():
    expected = call(*arguments)
    try:
        got = call(*(distribute_tensor(x, mesh, [Shard(1)]) for x in arguments)).full_tensor()
        text = f"{got[0].tolist()}"
        statuses.append(int(not torch.equal(got, expected)))
    except (RuntimeError, NotImplementedError) as error:
        text = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    if dist.get_rank() == 0:
        print(f"{name}: expected {expected[0].tolist()}, got {text}", flush=True)
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
