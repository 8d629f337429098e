"""Zero-bubble pipeline schedules raise where a stage, other than the first and the last, returns a view.

The first half of a backward detaches the outputs of the stage in place (`stage_backward_input` in
torch/distributed/pipelining/_backward.py), which autograd refuses for views. An input that a module of FSDP2 hands on
is a view as well.

severity: medium
visible: loud
training: it cannot begin with stages that end in a view, a transposition or a slice, and the other ranks wait
thread: none known
law: PP-6
avoid: return a copy
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()


class Viewed(nn.Linear):
    """Layer that returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        out = super().forward(x)
        return out.view(out.shape)


stages = [PipelineStage(Viewed(4, 4), index, 4, torch.device("cpu")) for index in (rank, rank + 2)]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
x = torch.ones(8, 4)
try:
    _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
except Exception as error:
    print(f"rank {rank}: expected a step, got {type(error).__name__}: {str(error.__cause__ or error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
