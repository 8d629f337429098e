"""The first F.scaled_dot_product_attention of sharded DTensors on the CPU takes twenty seconds.

DTensor derives the placements of the CPU's attention operator from its decomposition, again for each combination of
placements, and so those of each operator in it (torch/distributed/tensor/_decompositions.py,
`_propagate_through_decomp`). Accelerators have operators whose placements are written down.

severity: low
visible: hang
training: a run on the CPU seems to hang whenever attention has a new shape
thread: none known
law: none
avoid: use attention that is written with matmul and softmax, or local_map
ranks: 2
"""

import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

LIMIT_S = 8
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
heads = [distribute_tensor(torch.ones(3, 5, 3, 4), mesh, [Shard(0)]) for _ in range(3)]
# A process that is still busy at the limit ends here, with the status that says so.
signal.signal(
    signal.SIGALRM, lambda *_: sys.exit(print(f"expected a result, got none in {LIMIT_S} s", flush=True) or 1)
)
signal.alarm(LIMIT_S)
try:
    got, status = scaled_dot_product_attention(*heads).placements, 0
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
print(f"rank {dist.get_rank()}: expected a result, got {got}")
dist.destroy_process_group()
sys.exit(status)
