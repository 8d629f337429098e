"""accelerate cannot prepare a model with FSDP2 and tensor parallelism: it imports a class that transformers dropped.

`_prepare_tp` (accelerate/accelerator.py) imports `ReplicateParallel` of transformers.integrations.tensor_parallel for
every model that has DTensors. transformers 5.23.0 has no such class.

package: accelerate
severity: low
visible: loud
training: it cannot begin
thread: none known
law: none
avoid: load the model with transformers' DistributedConfig, or use older transformers
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as on a machine with accelerators
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
accelerator = Accelerator(
    cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)
)
model, got = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "a sharded model"
parallelize_module(model, accelerator.torch_device_mesh["tp"], {"0": ColwiseParallel()})
try:
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
except ImportError as error:
    got = str(error).partition("(")[0]
print(f"rank {dist.get_rank()}: expected a sharded model, got {got}")
dist.destroy_process_group()
sys.exit(int(got != "a sharded model"))
