"""cross_entropy under `loss_parallel` raises on a rank that has no classes, while the other ranks wait.

`_log_softmax` (torch/distributed/tensor/parallel/loss.py) leaves the all-reduce of the maximum out on such a rank, so
that its next one meets the other ranks' first; then it looks up classes in a shard that has none.

severity: low
visible: hang
training: four ranks cannot share five classes, which are 2, 2, 1 and 0; the run hangs until a time limit
thread: none known
law: TP-1
avoid: pad the classes so that each rank has some
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

dist.init_process_group("gloo")
group = dist.new_group(timeout=timedelta(seconds=2))
full, target = torch.zeros(2, 1), torch.tensor([0, 0])
expected = functional.cross_entropy(full, target)
logits = distribute_tensor(full, DeviceMesh.from_group(group, "cpu"), [Shard(1)])
try:
    with loss_parallel():
        got = functional.cross_entropy(logits, target).full_tensor()
    status = int(not torch.allclose(got, expected))
except (RuntimeError, IndexError) as error:
    got, status = f"{type(error).__name__}: {str(error)[:100]}", 1
print(f"rank {dist.get_rank()}: expected {expected}, got {got}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(status)
