"""ZBVZeroBubble and DualPipeV cannot evaluate: `eval` raises on the ranks in the middle, and the others wait.

Neighbouring stages on one rank pass each other gradients without asking whether there is a backward
(`get_local_bwd_output` in torch/distributed/pipelining/stage.py).

severity: medium
visible: loud
training: a model that is trained with such a schedule cannot be evaluated with it
thread: none known
law: PP-6
avoid: make another schedule without loss_fn for evaluation, such as ScheduleInterleaved1F1B, with stages of its own
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
stages = [PipelineStage(nn.Linear(4, 4), index, 4, torch.device("cpu")) for index in (rank, 3 - rank)]
schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
x = torch.ones(8, 4)
try:
    with torch.no_grad():
        _ = schedule.eval(x, target=x) if rank == 0 else schedule.eval()
except Exception as error:
    print(f"rank {rank}: expected an evaluation, got {type(error).__name__}: {str(error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
