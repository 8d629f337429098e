"""FSDP2 holds the input of a reduce-scatter until the next one is over, not until it begins.

`FSDPParamGroup.post_backward` (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py) clears the list of states, but
the variable of the loop that waits for them holds the last one. The thread has another fault of the same change.

severity: low
visible: silent
training: backward holds full gradients of one more FSDP group
thread: https://github.com/ROCm/pytorch/pull/3501
law: API-2
avoid: nothing known
ranks: 2
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
    sys.exit(2)
earlier, held = [], []


class ReduceScatter:
    """Reduce-scatter that counts the earlier inputs which are held."""

    def allocate(self, size, *, dtype, device):
        """Return a buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Reduce."""
        held.append(sum(tensor() is not None for tensor in earlier))
        earlier.append(weakref.ref(input_tensor))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


dist.init_process_group("gloo")
net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
for module in (*net, net):
    fully_shard(module).set_custom_reduce_scatter(ReduceScatter())
net(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    print(f"earlier inputs held in each reduce-scatter: expected {[0] * len(held)}, got {held}")
dist.destroy_process_group()
sys.exit(int(any(held)))
