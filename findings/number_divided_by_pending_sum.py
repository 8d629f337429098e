"""torch.div of a number by a DTensor that is a pending sum divides by each rank's share: the quotient is too large.

`2 / x` is right, since Python's operator takes a reciprocal. `torch.div(2, x)` is the operator `aten.div.Tensor` with
one DTensor, which is the divisor; torch/distributed/tensor/_ops/_pointwise_ops.py gives all of `binary_div_ops` the
rules of operators with one argument that are linear, which are meant for a number as the divisor.

severity: medium
visible: silent
training: means and scales that are computed as torch.div(number, sum) are too large by the square of the ranks
thread: none known
law: DT-3
avoid: write number / x, or redistribute a pending sum to Replicate() before it divides
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
total = DTensor.from_local(torch.ones(()), mesh, [Partial()])
expected, got = 2.0 / dist.get_world_size(), torch.div(2, total).full_tensor().item()
if dist.get_rank() == 0:
    print(f"expected {expected}, got {got} for 2 divided by a sum of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
