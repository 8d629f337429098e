"""`FSDPModule.set_reduce_scatter_max_input_buffers` has no effect after the first forward.

The number of buffers is read from all modules when the first forward starts (`FSDPState._init_shared_state`), and not
again: one that is raised later overlaps nothing, and one that is lowered frees nothing. The documentation names no such
limit, and other setters of FSDPModule count from the next iteration on.

severity: low
visible: silent
training: memory and overlap of reductions stay those of the first step
thread: none known
law: API-2
avoid: set the number before the first forward
ranks: 2
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh


class ReduceScatter:
    """Reduce-scatter that counts the inputs of earlier ones that are still held."""

    def __init__(self):
        self.held, self.inputs = [], []

    def allocate(self, size, *, dtype, device):
        """Return a buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Reduce the inputs of all ranks."""
        self.held.append(sum(earlier() is not None for earlier in self.inputs))
        self.inputs.append(weakref.ref(input_tensor))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


dist.init_process_group("gloo")
if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
    print("expected a method set_reduce_scatter_max_input_buffers, got none", flush=True)
    sys.exit(2)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
reduce = ReduceScatter()
for layer in model:
    fully_shard(layer, mesh=mesh).set_custom_reduce_scatter(reduce)
fully_shard(model, mesh=mesh)
held = {}
for buffers in (1, 3):
    model.set_reduce_scatter_max_input_buffers(buffers)
    reduce.held.clear()
    model(torch.ones(1, 4)).sum().backward()
    held[buffers] = list(reduce.held)
if dist.get_rank() == 0:
    print(f"expected [0, 1, 2] inputs held with three buffers, got {held[3]}; with one {held[1]}", flush=True)
dist.destroy_process_group()
sys.exit(int(held[3] != [0, 1, 2]))
