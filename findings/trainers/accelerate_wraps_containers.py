"""accelerate's `size_based_wrap` cannot prepare a model with a `ModuleList`: `fully_shard` refuses containers.

`fsdp2_prepare_auto_wrap_policy` (accelerate/utils/fsdp_utils.py) counts the elements of every module, those of
containers without `forward` too.

package: accelerate
severity: low
visible: loud
training: it cannot begin
thread: none known
law: fsdp-is-on
avoid: use auto_wrap_policy="transformer_based_wrap"
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as on a machine with accelerators
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10, cpu_ram_efficient_loading=False
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)


class Model(nn.Module):
    """Model with a container."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


model, got = Model(), "a sharded model"
try:
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
except ValueError as error:
    got = str(error).splitlines()[0]
print(f"rank {dist.get_rank()}: expected a sharded model, got {got}")
dist.destroy_process_group()
sys.exit(int(got != "a sharded model"))
