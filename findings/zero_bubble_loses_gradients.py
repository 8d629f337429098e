"""Zero-bubble pipeline schedules lose gradients of FSDP2 modules that are resharded after forward.

The first half of a stage's backward looks for the stage's parameters in the graph (`stage_backward_input` in
torch/distributed/pipelining/_backward.py). Those of a module that FSDP has resharded are shards, which no graph
contains: nothing is left for the second half. `_assert_unsharded` knows only what the schedule itself has resharded.

severity: high
visible: silent
training: a part of the micro-batches does not contribute to gradients
thread: none known
law: PAR-1
avoid: reshard_after_forward=False on all modules of a stage
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import init_device_mesh

MICRO_BATCHES = 4
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))


def gradient(*, reshard: bool) -> float:
    """Return the gradient of the weight of this rank's stages."""
    rank, stages, group = dist.get_rank(), [], mesh.get_group("pp")
    for index in (rank, rank + 2):
        module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.ones_(module[0].weight)
        fully_shard(module[0], mesh=mesh["dp"], reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
        x = torch.empty(1, 1, device="meta", requires_grad=True)
        stages.append(PipelineStage(module, index, 4, torch.device("cpu"), input_args=x, output_args=x, group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, lambda out, _: out.sum(), scale_grads=False)
    batch = torch.ones(MICRO_BATCHES, 1)
    schedule.step(*([] if rank else [batch]), target=batch, losses=[])
    grads = [stage.submod[0].weight.grad for stage in stages]
    return sum(float(grad.full_tensor()) for grad in grads if grad is not None)


expected, got = gradient(reshard=False), gradient(reshard=True)
print(f"expected {expected:g}, got {got:g}: gradients of two stages over {MICRO_BATCHES} micro-batches", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
