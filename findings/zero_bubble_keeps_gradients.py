"""Zero-bubble pipeline schedules keep the gradients of all received activations until the next step.

The first half of a stage's backward puts the gradient of its input into `.grad` of the receive buffer, and leaves it
there after it was sent (`stage_backward_input` in torch/distributed/pipelining/_backward.py). A whole backward sets it
to None, "prevents the gradients from persisting" (`stage_backward`). Only the next step clears what is left.

severity: low
visible: silent
training: each rank holds the gradients of its micro-batches' activations, through backward and the optimizer's step
thread: none known
law: MEM-6
avoid: set `.grad` of the received activations to None after each step, or use another schedule
ranks: 2
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

MICRO_BATCHES = 4
dist.init_process_group("gloo")


def kept_bytes(schedule_type: type) -> int:
    """Return the bytes of gradients of activations that this rank's stages hold after a step."""
    rank, stages, received = dist.get_rank(), [], []
    for index in (rank, rank + 2):
        module = torch.nn.Linear(256, 256)
        module.register_forward_pre_hook(lambda _, args: received.append(weakref.ref(args[0])))
        x = torch.empty(1, 256, device="meta", requires_grad=True)
        stages.append(PipelineStage(module, index, 4, torch.device("cpu"), input_args=x, output_args=x))
    schedule = schedule_type(stages, MICRO_BATCHES, lambda out, _: out.sum(), scale_grads=False)
    batch = torch.ones(MICRO_BATCHES, 256)
    schedule.step(*([] if rank else [batch]), target=batch, losses=[])
    held = [x for reference in received if (x := reference()) is not None]
    return sum(x.grad.nbytes for x in held if x.grad is not None)


expected, got = kept_bytes(ScheduleInterleaved1F1B), kept_bytes(ScheduleInterleavedZeroBubble)
print(f"expected {expected}, got {got}: bytes of sent gradients that are held after a step", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
