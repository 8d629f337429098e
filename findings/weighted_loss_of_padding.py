"""Backward of a weighted cross_entropy under `loss_parallel` raises IndexError if a target is padding (-100).

`_nll_loss_and_log_softmax_backward` (torch/distributed/tensor/parallel/loss.py) looks up the weights of classes by
`target`, where it takes care to use `safe_target` elsewhere. Over two mesh dimensions only ranks with padding raise,
and the others wait for them.

severity: medium
visible: loud
training: a loss with weights of classes cannot be trained on padded batches
thread: none known
law: TP-1
avoid: clamp the targets, and multiply losses of reduction="none" by a mask
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full, weight, target = torch.ones(2, 4), torch.ones(4), torch.tensor([-100, 1])
plain = full.clone().requires_grad_()
functional.cross_entropy(plain, target, weight=weight).backward()
logits = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
try:
    with loss_parallel():
        functional.cross_entropy(logits, target, weight=weight).backward()
    got = logits.grad.full_tensor()
    status = int(not torch.allclose(got, plain.grad))
except (RuntimeError, IndexError) as error:
    got, status = f"{type(error).__name__}: {str(error)[:80]}", 1
if dist.get_rank() == 0:
    print(f"expected {plain.grad.tolist()}, got {got}")
dist.destroy_process_group()
sys.exit(status)
