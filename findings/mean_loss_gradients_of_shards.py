"""Gradients of F.mse_loss and other mean losses of evenly sharded DTensors are too large by the number of shards.

The loss is right. Since torch 2.11 DTensor takes the placements of an operator from its decomposition and then runs
the operator on local shards; the backward operator divides by the local number of elements.

severity: high
visible: silent
training: the learning rate is multiplied by the number of shards
thread: none known
law: DT-3
avoid: compute the loss with reduction="sum", divide by the global number of elements
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
for name in ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"):
    full = torch.full((4, 2), 0.5).requires_grad_()  # two rows on each of two ranks
    target = torch.ones(4, 2)
    loss = getattr(functional, name)(full, target)
    loss.backward()
    expected = (loss.item(), full.grad[0, 0].item())
    shards = distribute_tensor(full.detach(), mesh, [Shard(0)]).requires_grad_()
    try:
        loss = getattr(functional, name)(shards, distribute_tensor(target, mesh, [Shard(0)]))
        loss.backward()
        got = (loss.full_tensor().item(), shards.grad.full_tensor()[0, 0].item())
        statuses.append(int(not torch.allclose(torch.tensor(got), torch.tensor(expected))))
    except (RuntimeError, NotImplementedError) as error:
        got = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    if dist.get_rank() == 0:
        print(f"{name}: expected loss and gradient {expected}, got {got}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
