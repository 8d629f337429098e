"""Gradients of ring attention are wrong, without an error, if backward comes after the context of `context_parallel`.

The context has then taken its dispatch of attention back, and DTensor's own rule gathers the shards. With the load
balanced, as by default, they are no neighbours: the causal mask lies over tokens in another order. Gradients of the
efficient kernel are wrong in any order, or refused. Here the CPU's own flash attention stands in for a device's.

severity: high
visible: silent
training: a loop that calls backward after the context trains on wrong gradients of queries, keys and values
thread: none known
law: CP-1
avoid: call backward inside the context, or switch the balance of the load off
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

flash, aten = "_scaled_dot_product_flash_attention", torch.ops.aten
cpu, cpu_backward = (getattr(aten, f"{flash}_for_cpu{suffix}") for suffix in ("", "_backward"))
others = None, None, 4, 4, torch.zeros(()), torch.zeros(()), torch.zeros(0)
library = torch.library.Library("aten", "IMPL")
library.impl(flash, lambda *args, **_: (*cpu(*args[:5]), *others), "CPU")
library.impl(f"{flash}_backward", lambda *args, **_: cpu_backward(*args[:6], args[10], args[11]), "CPU")


def scaled_dot_product_attention(*qkv):
    """Attend by the operator of devices."""
    return getattr(aten, flash)(*qkv, 0.0, True)[0]


torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.rand(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
expected = torch.autograd.grad(scaled_dot_product_attention(*full).square().sum(), full)[0].norm()
with context_parallel(mesh, buffers=(shards := list(full.detach().clone())), buffer_seq_dims=[2, 2, 2]):
    leaves = torch.stack(shards).requires_grad_()
    loss = torch.nn.functional.scaled_dot_product_attention(*leaves).square().sum()
loss.backward()
dist.all_reduce(got := leaves.grad.square().sum())
if dist.get_rank() == 0:
    print(f"expected gradients with a norm of {expected}, got {got.sqrt()}")
dist.destroy_process_group()
sys.exit(int(not torch.allclose(got.sqrt(), expected, rtol=1e-3)))
