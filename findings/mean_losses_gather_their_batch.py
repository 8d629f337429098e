"""F.cross_entropy of a sharded batch of DTensors gathers logits and targets in full on each rank.

The mean needs no more than the sums of losses and of weights, two numbers of each rank. The result is right. So do
F.nll_loss, and torch.any and torch.all, which F.gaussian_nll_loss calls.

severity: medium
visible: silent
training: memory and traffic of logits grow with the number of ranks
thread: https://github.com/pytorch/pytorch/pull/179203
law: DT-3
avoid: reduction="sum", divided by the number of targets
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
logits = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
targets = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
with CommDebugMode() as mode:
    functional.cross_entropy(logits, targets).full_tensor()
got = sum(count for name, count in mode.get_comm_counts().items() if "gather" in str(name))
if dist.get_rank() == 0:
    print(f"all-gathers of F.cross_entropy: expected 0, got {got}")
dist.destroy_process_group()
sys.exit(int(got > 0))
