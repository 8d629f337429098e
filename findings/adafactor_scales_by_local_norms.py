"""Adafactor steps with norms of each rank's own shard: sharded vectors get another step size on each rank.

Adafactor scales updates by `param.norm(2).item()` and `update.norm(2).item()` (torch/optim/_adafactor.py), and `item`
of a DTensor that is a pending norm is the rank's own number (torch/distributed/tensor/_sharding_prop.py lets
`_local_scalar_dense` pass, see pytorch#144054). Matrices are refused where they are reduced in place.

severity: medium
visible: silent
training: norms and biases learn at rates that depend on the number of ranks and differ between them
thread: none known
law: OPT-3
avoid: give vectors to another optimizer, or replicate them
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
statuses = []
for shape in ((4,), (4, 2)):
    expected = nn.Parameter(torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape))
    module = nn.Module()
    module.weight = nn.Parameter(expected.detach().clone())
    fully_shard(module, mesh=mesh)
    expected.grad = torch.ones(shape)
    module.weight.grad = distribute_tensor(torch.ones(shape), mesh, module.weight.placements)
    torch.optim.Adafactor([expected], lr=0.5).step()
    try:
        torch.optim.Adafactor(module.parameters(), lr=0.5).step()
        got = module.weight.full_tensor()
        statuses.append(int(not torch.allclose(got, expected)))
    except (RuntimeError, NotImplementedError) as error:
        got = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    if dist.get_rank() == 0:
        print(f"expected {expected.tolist()}, got {got if isinstance(got, str) else got.tolist()}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
