"""An error inside of `loss_parallel` does not end it: log_softmax of any DTensor is refused from then on.

Its context manager (torch/distributed/tensor/parallel/loss.py) yields without `try` and `finally`, so that the handlers
of log_softmax and nll_loss stay in place; one of the blocks that are nested ends it for the outer one, too.

severity: low
visible: loud
training: after an error that is caught, such as of memory, losses and softmax that are not sharded by classes fail
thread: none known
law: TP-1
avoid: enter and leave loss_parallel once more after an error
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

dist.init_process_group("gloo")
full = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
x = distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
expected = x.log_softmax(-1).full_tensor()
try:
    with loss_parallel():
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
try:
    got = x.log_softmax(-1).full_tensor().tolist()
    status = int(got != expected.tolist())
except Exception as error:
    got, status = f"{type(error).__name__}: {str(error)[:80]}", 1
if dist.get_rank() == 0:
    print(f"expected {expected.tolist()}, got {got}")
dist.destroy_process_group()
sys.exit(status)
