"""GradScaler skips a step on some ranks alone if the first gradient is replicated and another one overflows on a shard.

DTensor asks the ranks among which the first gradient is sharded, for all gradients. With tensor parallelism and norms
first, no other rank hears of an overflow: ranks take different steps, and go on with different scales.

severity: high
visible: silent
training: ranks diverge after the first overflow of fp16 in a shard of tensor parallelism
thread: none known
law: AMP-4
avoid: reduce `found_inf` over all ranks in a subclass of GradScaler, as reference_trainer/loss.py does
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel()})
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
if dist.get_rank() == 1:
    gradient = model[1].weight.grad
    assert isinstance(gradient, DTensor)
    gradient.to_local().fill_(torch.inf)
scaler, optimizer = GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=1.0)
scaler.scale(torch.ones(()))
scaler.step(optimizer)
scaler.update()
print(f"rank {dist.get_rank()}: expected a scale of 2.0 after the overflow, got {scaler.get_scale()}", flush=True)
wrong = torch.tensor(int(scaler.get_scale() != 2.0))
dist.all_reduce(wrong, dist.ReduceOp.MAX)
dist.destroy_process_group()
sys.exit(int(wrong))
