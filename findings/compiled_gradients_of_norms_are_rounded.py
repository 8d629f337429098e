"""Under fully_shard, gradients of a norm's weight are rounded to param_dtype only if the module is compiled.

Since 2.15 FSDP leaves gradients in the dtype in which autograd computes them (`_set_unsharded_grad_dtypes` in
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py), and those of a norm are computed in fp32. A compiled graph
was traced with a parameter whose `grad_dtype` is its own dtype, and rounds them before they are reduced in fp32.

severity: low
visible: silent
training: runs that are compiled and runs that are not differ by a rounding to bf16 in the gradients of norms
thread: none known
law: none
avoid: nothing is needed, unless a compiled run is to be compared with an eager one
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradient(*, compiled: bool) -> Tensor:
    """Return the gradient of the weight after one backward."""
    torch.manual_seed(dist.get_rank())
    norm = nn.RMSNorm(64)
    model = nn.Sequential(torch.compile(norm, backend="aot_eager") if compiled else norm)
    fully_shard(model, mp_policy=policy)
    model(torch.randn(32, 64)).pow(3).sum().backward()
    return model[0].weight.grad.full_tensor()


expected, got = gradient(compiled=False), gradient(compiled=True)
wrong = int((got != expected).sum())
if dist.get_rank() == 0:
    print(f"expected 0, got {wrong}: of 64 elements differ from those of the eager module", flush=True)
dist.destroy_process_group()
sys.exit(int(wrong > 0))
