"""F.conv2d of images sharded along height, width or channels returns one rank's part as the replicated result.

DTensor has a rule for a sharded batch alone; for other layouts it asks for replicated images. The operator's own
handler (torch/distributed/tensor/_tp_conv.py) does not redistribute, and computes with what each rank has.

severity: high
visible: silent
training: convolutions see a part of each image, and their inputs get no gradient
thread: https://github.com/pytorch/pytorch/issues/191926
law: DT-3
avoid: shard the batch, or redistribute images to Replicate() before the convolution
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
images, kernel = torch.arange(32.0).view(1, 2, 4, 4), torch.ones(1, 2, 3, 3)
expected = functional.conv2d(images, kernel, padding=1)
try:
    sharded, replicated = distribute_tensor(images, mesh, [Shard(3)]), distribute_tensor(kernel, mesh, [Replicate()])
    got = functional.conv2d(sharded, replicated, padding=1).full_tensor()
except RuntimeError as error:
    print(f"refused: {str(error).splitlines()[0][:80]}", flush=True)
    dist.destroy_process_group()
    sys.exit(2)
if dist.get_rank() == 0:
    print(f"expected a first row of {expected[0, 0, 0].tolist()}, got {got[0, 0, 0].tolist()}", flush=True)
dist.destroy_process_group()
sys.exit(int(not torch.equal(got, expected)))
