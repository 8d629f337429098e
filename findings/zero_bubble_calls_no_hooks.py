"""Zero-bubble pipeline schedules call no hooks on the gradients of parameters.

The second half of a backward computes gradients by `torch.autograd.grad` and adds them to `.grad` itself
(`stage_backward_weight` in torch/distributed/pipelining/_backward.py). DDP reduces gradients in such hooks: its
replicas keep gradients of their own.

severity: high
visible: silent
training: replicas of DDP drift apart; gradient hooks, such as optimizers that step in backward, do nothing
thread: https://github.com/pytorch/pytorch/issues/144530
law: PP-6
avoid: another schedule, or FSDP2 without resharding after forward
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank, calls = dist.get_rank(), []
stages = []
for index in (rank, rank + 2):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    stages.append(PipelineStage(layer, index, 4, torch.device("cpu")))
schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=lambda out, _: out.sum())
batch = torch.ones(MICRO_BATCHES, 1)
_ = schedule.step(batch) if rank == 0 else schedule.step(target=batch)
expected = MICRO_BATCHES * len(stages)
print(f"rank {rank}: expected {expected}, got {len(calls)}: calls of hooks of two stages", flush=True)
dist.destroy_process_group()
sys.exit(int(len(calls) != expected))
