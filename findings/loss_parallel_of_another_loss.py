"""Under `loss_parallel` log_softmax passes gradients on unchanged, unless nll_loss takes its result.

`_log_softmax_backward_handler` (torch/distributed/tensor/parallel/loss.py) returns its input, since the handler of
nll_loss has applied the gradient of log_softmax already. The gradient of any other use of log-probabilities lacks the
softmax.

severity: high
visible: silent
training: DPO, distillation and label smoothing by log-probabilities of parallel logits have wrong gradients
thread: https://github.com/pytorch/pytorch/issues/190746
law: TP-1
avoid: use nothing but F.cross_entropy under `loss_parallel`
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(4.0).reshape(1, 4)
expected = full.clone().requires_grad_()
(expected.log_softmax(1) * full).sum().backward()
logits = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
with loss_parallel():
    log_probabilities = logits.log_softmax(1)
    (log_probabilities * distribute_tensor(full, mesh, [Shard(1)])).sum().backward()
got = logits.grad.full_tensor()
if dist.get_rank() == 0:
    print(f"expected {expected.grad}, got {got}")
dist.destroy_process_group()
sys.exit(int(not torch.allclose(got, expected.grad)))
