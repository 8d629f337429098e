"""An evaluation between two steps of a pipeline clears the gradients of stages that FSDP2 shards.

When a schedule goes from training to evaluation or back, its stages learn shapes again, and then set all gradients of
FSDP modules to None (`_post_metadata_inference_cleanup` in torch/distributed/pipelining/stage.py).

severity: high
visible: silent
training: gradients that were accumulated before an evaluation are lost, on all stages
thread: none known
law: PP-6
avoid: evaluate after the optimizer's step only, and step before the evaluation
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
rank = dist.get_rank()
layer = nn.Linear(4, 4)
fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
stage = PipelineStage(layer, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
x = torch.arange(16.0).view(4, 4)
_ = schedule.step(x) if rank == 0 else schedule.step(target=2 * x)
before = layer.weight.grad is not None
with torch.no_grad():
    _ = schedule.eval(x) if rank == 0 else schedule.eval(target=x)
after = layer.weight.grad is not None
print(f"rank {rank}: expected {before}, got {after}: is the gradient still there after an evaluation?", flush=True)
dist.destroy_process_group()
sys.exit(int(before != after))
