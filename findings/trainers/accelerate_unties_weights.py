"""accelerate unties weights with `cpu_ram_efficient_loading` if the model has no method `tie_weights`.

`fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py) moves the model to the meta device and loads a state dict into
it: both make a parameter for each name. Afterwards `tie_weights` is called if there is such a method, as models of
transformers have it.

package: accelerate
severity: high
visible: silent
training: embedding and output layer are trained apart, and the optimizer holds only one of them
thread: none known
law: tied-weights
avoid: give the model a method `tie_weights`, or set cpu_ram_efficient_loading=False
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
statuses = {}
for efficient in (False, True):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=efficient
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    statuses[efficient] = int(model[1].weight is not model[0].weight)
    got = len(list(model.parameters()))
    print(f"rank {dist.get_rank()}, cpu_ram_efficient_loading={efficient}: expected 1 parameter, got {got}")
dist.destroy_process_group()
sys.exit(max(statuses.values()))
