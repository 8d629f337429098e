"""accelerate runs plain DDP in place of FSDP where there is no accelerator, without a warning.

`Accelerator(cpu=True, fsdp_plugin=...)` becomes `DistributedType.MULTI_CPU` (accelerate/state.py), and `prepare` wraps
the model in `DistributedDataParallel`.

package: accelerate
severity: low
visible: silent
training: a test of a training script on CPUs tests another parallelisation than the one that will run
thread: none known
law: fsdp-is-on
avoid: look for DTensors in the prepared model
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = nn.Linear(4, 4)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(f"rank {dist.get_rank()}: expected FSDPLinear, got {type(model).__name__}")
dist.destroy_process_group()
sys.exit(int(not isinstance(model, FSDPModule)))
