"""Mean losses of unevenly sharded DTensors are the mean of the ranks' means, and so are their gradients.

Each rank divides by its own number of elements; the result is `Partial("avg")` for any sizes of the shards. The fault
of pytorch#162692, which was fixed for `mean`, remains in losses that have separate operators.

severity: high
visible: silent
training: samples of smaller shards weigh more, in the loss and in the gradients
thread: none known
law: DT-3
avoid: shard evenly, or compute the loss with reduction="sum" and divide by the global number of elements
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
statuses = []
names = ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
for name in (*names, "binary_cross_entropy", "binary_cross_entropy_with_logits"):
    full = torch.tensor([[0.75], [0.75], [0.25]])  # two rows on rank 0, one on rank 1
    target = torch.ones(3, 1)
    expected = getattr(functional, name)(full, target)
    try:
        loss = getattr(functional, name)(*(distribute_tensor(x, mesh, [Shard(0)]) for x in (full, target)))
        got = loss.full_tensor()
        statuses.append(int(not torch.allclose(got, expected)))
    except (RuntimeError, NotImplementedError) as error:
        got = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    if dist.get_rank() == 0:
        print(f"{name}: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
