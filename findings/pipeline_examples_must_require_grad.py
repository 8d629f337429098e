"""A pipeline raises in backward if the example tensors of its stages do not require gradients.

`input_args` and `output_args` of PipelineStage are documented as example tensors, and a plain one requires no gradient:
the stage before then gets none (`_retrieve_recv_activations` in torch/distributed/pipelining/stage.py), and raises.

severity: medium
visible: loud
training: it cannot begin: the first backward raises, on some ranks
thread: none known
law: PP-6
avoid: give no examples, or such that require gradients where activations do
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
example = torch.ones(2, 4)
stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"), input_args=example, output_args=example)
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
x = torch.ones(4, 4)
try:
    _ = schedule.step(x) if rank == 0 else schedule.step(target=x)
except Exception as error:
    print(f"rank {rank}: expected a step, got {type(error).__name__}: {str(error.__cause__ or error)[:80]}", flush=True)
    sys.exit(1)
sys.exit(0)
