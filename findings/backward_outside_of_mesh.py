"""Backward through `redistribute` or `from_local` of a DTensor raises on ranks outside of its mesh.

Forward, such ranks hold empty tensors and go on. Backward they expect the strides of a full gradient
(`Redistribute.backward` and `_ToTorchTensor.backward` in torch/distributed/tensor), and raise alone.

severity: low
visible: loud
training: ranks that hold none of a model's experts or stages raise, and the others wait for them
thread: none known
law: DT-4
avoid: call such code on the ranks of the mesh alone
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = DeviceMesh("cpu", [0])
x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
y = x.redistribute(placements=[Replicate()]).sum()
try:
    y.backward()
    outcome = "a gradient"
except RuntimeError as error:
    outcome = repr(error)
print(f"torch {torch.__version__}, rank {dist.get_rank()}: expected a gradient, got {outcome}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(int(outcome != "a gradient"))
