"""accelerate prepares an optimizer over a model on the meta device so that it holds one parameter for all.

`_prepare_fsdp2` (accelerate/accelerator.py) tells parameters apart by `data_ptr()`, which is 0 for each tensor on the
meta device. The last one stands for all of them in the optimizer. (accelerate#3930, closed, is about a model on the
meta device on some ranks.)

package: accelerate
severity: high
visible: silent
training: one parameter learns, several times in each step, and all others keep their initial weights
thread: none known
law: optimizer-holds-each-once
avoid: make the optimizer of the parameters of the prepared model
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
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
names = {id(parameter): name for name, parameter in model.named_parameters()}
expected, got = (
    list(names.values()),
    [names.get(id(p), "?") for group in optimizer.param_groups for p in group["params"]],
)
print(f"rank {dist.get_rank()}: the optimizer holds: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(int(got != expected))
