"""`context_parallel_unshard` cannot unshard a tensor whose first dimension is the sequence, if the load is balanced.

It puts each row of the first dimension, which it takes for the batch, back into order along the dimension before the
sequence's. `context_parallel` itself shards such tensors, for example positions and rotary frequencies, and restores
them.

severity: low
visible: loud
training: positions and frequencies that context parallelism has sharded cannot be gathered by its own function
thread: none known
law: CP-1
avoid: add a dimension in front before the call, and take it away after
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
expected = torch.arange(8)
positions = expected.clone()
with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
    try:
        got = context_parallel_unshard(mesh, [positions.clone()], [0])[0].tolist()
    except (IndexError, RuntimeError) as error:
        got = repr(error)
if dist.get_rank() == 0:
    print(f"expected {expected.tolist()}, got {got}")
dist.destroy_process_group()
sys.exit(int(got != expected.tolist()))
