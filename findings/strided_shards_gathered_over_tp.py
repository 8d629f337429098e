"""A weight with FSDP2 and tensor parallelism cannot be gathered over tensor parallelism alone.

`weight.redistribute(placements=(weight.placements[0], Replicate()))` raises RuntimeError for a column-wise layer of
eight rows on 2 x 2 ranks. For five rows each rank gets a shard of five rows, with rows of zeros, instead of three and
two, and `full_tensor()` of it is wrong. So are other redistributions between such layouts and Shard(0) over tensor
parallelism, and the gradients of those that are right. Gathering over both dimensions, or over FSDP alone, works.

severity: high
visible: silent
training: weights that a step or an export gathers over tensor parallelism alone are wrong
thread: none known
law: DT-5
avoid: redistribute through (Replicate(), Replicate())
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
status = 0
for rows in (8, 5):
    layer = nn.Linear(1, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, rows + 1).view(rows, 1))
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    weight = layer.weight.detach()
    expected = [index + 1.0 for index in range(rows)]
    try:
        gathered = weight.redistribute(placements=(weight.placements[0], Replicate()))
        got = repr(gathered.full_tensor().flatten().tolist())
    except RuntimeError as error:
        got = repr(error)[:60]
    status |= got != repr(expected)
    if dist.get_rank() == 0:
        print(f"{rows} rows: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
