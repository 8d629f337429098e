"""accelerate cannot prepare a model with FSDP2, tensor parallelism and `cpu_ram_efficient_loading`.

`fsdp2_load_full_state_dict` (accelerate/utils/fsdp_utils.py) takes the local shard of a tensor-parallel parameter for
the full one, and distributes it over both dimensions of the mesh.

package: accelerate
severity: low
visible: loud
training: it cannot begin
thread: none known
law: none
avoid: set cpu_ram_efficient_loading=False
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
from transformers.integrations import tensor_parallel

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # as on a machine with accelerators
tensor_parallel.ReplicateParallel = object  # accelerate imports it, see accelerate_needs_replicate_parallel.py
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=True)
accelerator = Accelerator(
    cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)
)
model, got = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "a sharded model"
parallelize_module(model, accelerator.torch_device_mesh["tp"], {"*": ColwiseParallel()})
try:
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
except RuntimeError as error:
    got = " ".join(str(error).split())[:300]
print(f"rank {dist.get_rank()}: expected a sharded model, got {got}")
dist.destroy_process_group()
sys.exit(int(got != "a sharded model"))
