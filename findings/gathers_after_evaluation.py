"""A forward pass without gradients between backward and the next step makes FSDP2 gather the last layer once more.

In the next backward pass a group is gathered that forward has just gathered, and so it is after
`set_is_last_backward(False)`. The results are right.

severity: low
visible: silent
training: one more all-gather in each step that follows an evaluation
thread: none known
law: none
avoid: nothing known; the cost is that of one gather
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def gathers(*, evaluates: bool) -> list[int]:
    """Return the number of all-gathers of each step."""
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(3)))
    fully_shard(model, mesh=mesh)
    counts = []
    for _ in range(3):
        with CommDebugMode() as mode:
            model(torch.ones(2, 4)).sum().backward()
        counts.append(sum(count for name, count in mode.get_comm_counts().items() if "gather" in str(name)))
        if evaluates:
            with torch.no_grad():
                model(torch.ones(2, 4))
        model.zero_grad()
    return counts


expected, got = gathers(evaluates=False), gathers(evaluates=True)
if dist.get_rank() == 0:
    print(f"all-gathers of each step: expected {expected}, with an evaluation in between got {got}")
dist.destroy_process_group()
sys.exit(int(expected != got))
