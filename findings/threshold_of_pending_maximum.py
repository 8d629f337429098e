"""F.threshold of a DTensor that is a pending maximum replaces numbers of single ranks that are not the maximum.

DTensor lets the operator pass a pending maximum, as if it were monotone; it is not where the replacement is larger than
the threshold: the maximum of the replaced numbers is then taken for the result.

severity: low
visible: silent
training: none known that thresholds a pending maximum
thread: none known
law: DT-3
avoid: redistribute to Replicate() first
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
maximum = DTensor.from_local(torch.tensor([float(dist.get_rank()) * 4]), mesh, [Partial("max")])
expected = functional.threshold(torch.tensor([4.0]), 1.0, 20.0).item()
try:
    got = functional.threshold(maximum, 1.0, 20.0).full_tensor().item()
    status = int(got != expected)
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
if dist.get_rank() == 0:
    print(f"expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
