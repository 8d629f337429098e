"""A pipeline with several stages on each rank holds all activations that it has sent until the step is over.

The runtime of such schedules waits for its sends after the last action of a step, and each send holds its tensor
(`send_ops` in `_PipelineScheduleRuntime._step_microbatches`, torch/distributed/pipelining/schedules.py). Gradients that
are sent stay as well. Schedules with one stage on each rank wait for each send before the next.

severity: low
visible: silent
training: a rank holds a tensor of activations and one of gradients for each micro-batch and border, sent long before
thread: https://github.com/pytorch/pytorch/pull/193903
law: none
avoid: fewer micro-batches, or one stage on each rank
ranks: 2
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import init_device_mesh

MICRO_BATCHES = 8
dist.init_process_group("gloo")
group = init_device_mesh("cpu", (2,)).get_group()
activations: list[weakref.ref] = []
alive: list[int] = []


stages, x = [], torch.empty(1, 1, device="meta", requires_grad=True)
for index in (dist.get_rank(), dist.get_rank() + 2):
    module = torch.nn.Linear(1, 1)
    stages.append(PipelineStage(module, index, 4, torch.device("cpu"), input_args=x, output_args=x, group=group))
first = stages[0].submod
first.register_forward_hook(lambda _module, _inputs, output: activations.append(weakref.ref(output.untyped_storage())))
first.weight.register_post_accumulate_grad_hook(
    lambda _: alive.append(sum(activation() is not None for activation in activations))
)
schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, lambda out, _: out.sum(), scale_grads=False)
batch = torch.ones(MICRO_BATCHES, 1)
schedule.step(*([] if dist.get_rank() else [batch]), target=batch, losses=[])
print(f"expected 1, got {alive[-1]}: activations held in the last of {MICRO_BATCHES} backwards", flush=True)
dist.destroy_process_group()
sys.exit(int(alive[-1] > 1))
