"""error_if_nonfinite with the inf-norm does not raise on all ranks if one rank's shard has a NaN.

gloo's maximum loses a NaN of the second rank, so that no rank raises; and the norm is not reduced where it is tested.

severity: medium
visible: silent
training: the run goes on with NaN in its gradients, or one rank stops and the others wait
thread: https://github.com/pytorch/pytorch/issues/166638
law: CLIP-6
avoid: test the 2-norm instead
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))
status = 0
for norm_type in (2.0, float("inf")):
    for holder in range(world_size):
        weight = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh).weight
        shard = torch.full_like(weight.to_local(), float("nan") if rank == holder else 1.0)
        weight.grad = DTensor.from_local(shard, mesh, weight.placements)
        raised = torch.zeros(1)
        try:
            nn.utils.clip_grad_norm_([weight], 1.0, norm_type=norm_type, error_if_nonfinite=True)
        except RuntimeError:
            raised.fill_(1)
        dist.all_reduce(raised)
        status |= int(raised.item() != world_size)
        if rank == 0:
            print(
                f"norm {norm_type}, NaN on rank {holder}: expected {world_size} ranks to raise, got {raised.item():g}"
            )
dist.destroy_process_group()
sys.exit(status)
