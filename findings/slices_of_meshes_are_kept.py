"""Each slice of a DeviceMesh, as `mesh["dp"]`, leaves a context variable and its value in the thread for ever.

`DeviceMesh.__getitem__` enters a patch of the configuration of torch.compile, which makes a context variable of its own
each time, and sets it. Leaving the patch sets it again, but a context holds each variable that was ever set in it.

severity: low
visible: silent
training: loops that slice a mesh in each step, as for a group or a degree, grow by half a kilobyte each time
thread: none known
law: MEM-6
avoid: slice meshes once, before the first step, or use `mesh.get_group("dp")` and `mesh.size(0)`, which keep nothing
ranks: 2
"""

import contextvars
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SLICES = 100

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
mesh["dp"]
before = len(contextvars.copy_context())
for _ in range(SLICES):
    mesh["dp"]
got = len(contextvars.copy_context()) - before
if dist.get_rank() == 0:
    print(f"expected no context variable more after {SLICES} slices of a mesh, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != 0))
