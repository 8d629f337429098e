"""`SequenceParallel` thaws frozen norms: `requires_grad` of the parameters that it replicates is True again.

`SequenceParallel._replicate_module_fn` makes new parameters without the `requires_grad` of the old ones, which
`ColwiseParallel` and `RowwiseParallel` keep: https://github.com/pytorch/pytorch/pull/171709 has not reached this style.

severity: medium
visible: silent
training: norms that were frozen before `parallelize_module` are trained, if the optimizer takes what requires gradients
thread: https://github.com/pytorch/pytorch/issues/171523
law: none
avoid: freeze after parallelize_module
ranks: 2
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).requires_grad_(False)
parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel()})
trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
if dist.get_rank() == 0:
    print(f"expected no parameter that requires gradients, got {trained}", flush=True)
dist.destroy_process_group()
sys.exit(int(bool(trained)))
