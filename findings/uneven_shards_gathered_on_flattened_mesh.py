"""Rows that two mesh dimensions shard unevenly are gathered wrongly once these dimensions are flattened.

`DeviceMesh._flatten`, to which torch advises in a warning, lets DTensor merge two all-gathers into one. It takes the
shards for those of one dimension of as many ranks: five rows on 2 x 2 ranks are 2, 1, 1, 1 rows, and not 2, 2, 1, 0.
Reduce-scatters are merged only where the rows can be divided (`_redistribute.py`, `try_create_flattened`).

severity: high
visible: silent
training: weights and gradients with such rows lose some, for which rows of zeros stand, in `full_tensor()` as well
thread: https://github.com/pytorch/pytorch/pull/194457
law: DT-5
avoid: choose sizes that all ranks divide, or do not flatten the mesh
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
mesh._flatten()
rows = torch.arange(1.0, 6.0).view(5, 1)
got = distribute_tensor(rows, mesh, (Shard(0), Shard(0))).full_tensor()
if dist.get_rank() == 0:
    print(f"expected {rows.flatten().tolist()}, got {got.flatten().tolist()}", flush=True)
status = int(not torch.equal(got, rows))
dist.destroy_process_group()
sys.exit(status)
