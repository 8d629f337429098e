"""index_add_, index_copy_ and scatter_add_ along the sharded dimension write nothing, and relabel the shards as copies.

The operator is computed on gathered copies. Its in-place form then gives the DTensor the placements of the result,
`Replicate()`, but not its numbers: each rank keeps its own shard and takes it for the tensor
(torch/distributed/tensor/_dispatch.py, the branch `if is_inplace_op`). Other operators refuse to change placements in
place.

severity: high
visible: silent
training: updates are lost, ranks go on with different tensors of another shape
thread: none known
law: DT-3
avoid: use index_add, index_copy and scatter_add
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, statuses = init_device_mesh("cpu", (dist.get_world_size(),)), []
index, source = torch.tensor([[3, 3], [0, 0]]), torch.ones(2, 2)
calls = {
    "index_add_": lambda x, i, y: x.index_add_(0, i[:, 0], y),
    "index_copy_": lambda x, i, y: x.index_copy_(0, i[:, 0], y),
    "scatter_add_": lambda x, i, y: x.scatter_add_(0, i, y),
}
for name, call in calls.items():
    expected = torch.arange(8.0).view(4, 2)
    shards = distribute_tensor(expected, mesh, [Shard(0)])
    call(expected, index, source)
    try:
        call(shards, *(distribute_tensor(x, mesh, [Replicate()]) for x in (index, source)))
        got = f"{shards.full_tensor().tolist()}, {shards.placements}"
        statuses.append(int(not torch.equal(shards.full_tensor(), expected)))
    except (RuntimeError, NotImplementedError) as error:
        got = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    print(f"rank {dist.get_rank()}, {name}: expected {expected.tolist()}, got {got}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
