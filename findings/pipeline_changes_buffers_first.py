"""A pipeline's first step, and the first after an evaluation, changes buffers of its modules once too often.

To learn shapes, a stage computes the first micro-batch before the step (`_forward_metadata_inference` in
torch/distributed/pipelining/stage.py): running statistics and counters take it in twice.

severity: medium
visible: silent
training: batch norm, routing statistics and counters of tokens see a micro-batch twice, again after each evaluation
thread: https://github.com/pytorch/pytorch/pull/188558
law: PP-6
avoid: give each PipelineStage input_args and output_args, or torch 2.14
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES = 2
dist.init_process_group("gloo")
rank = dist.get_rank()
norm = nn.BatchNorm1d(4)
stage = PipelineStage(norm, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
x = torch.arange(16.0).view(4, 4)
_ = schedule.step(x) if rank == 0 else schedule.step(target=x)
got = int(norm.num_batches_tracked)
print(f"rank {rank}: expected {MICRO_BATCHES}, got {got}: batches that the norm has seen", flush=True)
dist.destroy_process_group()
sys.exit(int(got != MICRO_BATCHES))
