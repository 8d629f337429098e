"""`FSDPModule.set_reduce_scatter_max_input_buffers` has no effect after the first forward.

It is read then, and not again. Other setters count from the next iteration on.

severity: low
visible: silent
training: memory and overlap stay those of the first step
thread: none known
law: API-2
avoid: set the number before the first forward
ranks: 2
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
if not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
    print("expected a method set_reduce_scatter_max_input_buffers, got none", flush=True)
    sys.exit(2)
held, inputs = [], []  # of each reduce-scatter


class ReduceScatter:
    """Reduce-scatter that counts the inputs of earlier ones that are still held."""

    allocate = torch.empty

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Reduce."""
        held.append(sum(earlier() is not None for earlier in inputs))
        inputs.append(weakref.ref(input_tensor))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
for module in (*model, model):
    fully_shard(module, mesh=init_device_mesh("cpu", (2,))).set_custom_reduce_scatter(ReduceScatter())
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    model.set_reduce_scatter_max_input_buffers(3)
print(f"expected [0, 1, 2] inputs held with three buffers, got {held[3:]}", flush=True)
dist.destroy_process_group()
sys.exit(int(held[3:] != [0, 1, 2]))
