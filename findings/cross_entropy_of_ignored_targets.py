"""F.cross_entropy of a sharded batch is the mean of the ranks' means, even if they ignore different numbers of targets.

A rank divides by the number, or by the weight, of its own targets, and the result is `Partial("avg")`:
`nll_loss_forward_strategy` in torch/distributed/tensor/_ops/_math_ops.py asks for shards of equal length alone. Ranks
with more ignored targets count as much as all others; the loss is NaN if one has nothing else. Weights of classes,
nll_loss and the gradients have the same fault.

severity: high
visible: silent
training: tokens of sequences with more padding weigh more, in the loss and in the gradients; NaN for padding alone
thread: https://github.com/pytorch/pytorch/issues/185167
law: DT-3
avoid: compute the loss with reduction="sum", and divide by the global number, or weight, of targets
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
logits, targets = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [4.0, 0.0]]), torch.tensor([0, 0, 0, -100])
expected = functional.cross_entropy(logits, targets).item()
sharded = (distribute_tensor(x, mesh, [Shard(0)]) for x in (logits, targets))
try:
    got = functional.cross_entropy(*sharded).full_tensor().item()
except Exception as error:
    print(f"refused: {error!s:.120}", flush=True)
    sys.exit(2)
if dist.get_rank() == 0:
    print(f"expected {expected:.4f}, got {got:.4f}, with one of four targets ignored", flush=True)
dist.destroy_process_group()
sys.exit(int(abs(got - expected) > 1e-5))
