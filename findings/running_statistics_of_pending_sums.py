"""F.batch_norm leaves running statistics as they were if they are pending sums, without an error.

DTensor redistributes the statistics before `aten.native_batch_norm` changes them in place: the copies that were made
are changed, and dropped.

severity: low
visible: silent
training: statistics for evaluation stay at their initial values
thread: none known
law: DT-3
avoid: replicate running statistics
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
batch = torch.arange(8.0).reshape(4, 2)
mean, var = (DTensor.from_local(torch.full((2,), 0.5), mesh, [Partial()]) for _ in range(2))
expected, expected_var = torch.ones(2), torch.ones(2)
functional.batch_norm(batch, expected, expected_var, training=True)
try:
    functional.batch_norm(distribute_tensor(batch, mesh, [Shard(0)]), mean, var, training=True)
except Exception as error:
    print(f"refused: {error!s:.120}", flush=True)
    sys.exit(2)
got = mean.full_tensor()
if dist.get_rank() == 0:
    print(f"expected a running mean of {expected.tolist()}, got {got.tolist()}", flush=True)
dist.destroy_process_group()
sys.exit(int(not torch.allclose(got, expected)))
