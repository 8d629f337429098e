"""`set_reduce_scatter_unused_params` fails in accumulation: ranks without a parameter raise, the others wait.

With `reduce_dtype` above `param_dtype`, gradients of micro-batches without reduction are kept in `reduce_dtype`. The
zeros for a parameter that a rank has not used are in `param_dtype` (`FSDPParam.unsharded_zero_grad_data`), so that
`foreach_reduce` finds two dtypes in one group and raises, on these ranks alone.

severity: medium
visible: hang
training: modules that some ranks do not use, in bf16 with fp32 reductions and `set_requires_gradient_sync(False)`
thread: https://github.com/pytorch/pytorch/issues/196996
law: API-3
avoid: reduce every micro-batch, or set `reduce_dtype` to `param_dtype`
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    print("expected a method set_reduce_scatter_unused_params, got none", flush=True)
    sys.exit(2)
model = nn.Bilinear(1, 1, 1)  # whose bias is the parameter that rank 0 alone uses
if dist.get_rank():
    model.forward = lambda x, y: torch.einsum("bi,oij,bj->bo", x, model.weight, y)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
model.set_reduce_scatter_unused_params(True)
got = "gradients"
try:
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(torch.ones(1, 1), torch.ones(1, 1)).backward()
except Exception as error:
    got = f"{type(error).__name__}: {error!s:.90}"
print(f"rank {dist.get_rank()}: expected gradients, got {got}", flush=True)
sys.exit(int(got != "gradients"))
