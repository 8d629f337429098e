"""ZBVZeroBubble raises where a stage hands on its input, and its modules have hooks on it, as those of FSDP2 have.

The first half of a backward detaches the outputs of a stage in place (`stage_backward_input` in
torch/distributed/pipelining/_backward.py), and with them an input that is an output as well.

severity: low
visible: loud
training: with FSDP2 or checkpointing in stages that hand on residuals it cannot begin
thread: none known
law: PP-6
avoid: hand on a copy of the input
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
rank = dist.get_rank()


class Passing(nn.Linear):
    """Layer that adds what it is passed, and hands on its input."""

    is_last = False

    def forward(self, x: Tensor, passed: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the output."""
        out = super().forward(x) + (0 if passed is None else passed)
        return out if self.is_last else (out, x)


stages = []
for index in (rank, 3 - rank):
    layer = Passing(4, 4)
    layer.is_last = index == 3
    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    stages.append(PipelineStage(layer, index, 4, torch.device("cpu"), group=mesh.get_group("pp")))
schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
x = torch.ones(8, 4)
try:
    _ = schedule.step(x, target=x) if rank == 0 else schedule.step()
except Exception as error:
    print(f"rank {rank}: expected a step, got {type(error).__name__}: {str(error.__cause__ or error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
