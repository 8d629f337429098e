"""The inf-norm of a DTensor that is a pending maximum counts absolute values of numbers that other ranks overrule.

The norm is taken on each rank and left to the same maximum. That is right for numbers that are not negative alone: a
rank's large negative number loses the maximum, and its absolute value wins it. `abs` reduces first, and is right.

severity: low
visible: silent
training: norms of tensors that are maxima over ranks, such as scales of quantisation, are too large
thread: none known
law: DT-3
avoid: redistribute to Replicate() before the norm
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
own = torch.tensor([-6.0 if dist.get_rank() == 0 else 1.0, 4.0])
x = DTensor.from_local(own, mesh, [Partial("max")], run_check=False)
full = x.full_tensor()
expected = full.abs().max().item()
got = torch.linalg.vector_norm(x, float("inf")).full_tensor().item()
if dist.get_rank() == 0:
    print(f"expected {expected} as the inf-norm of {full.tolist()}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
