"""`context_parallel` cuts a sequence that its ranks cannot share equally into unequal shards, and says nothing.

Ring attention exchanges keys and values of one size: gloo ends a process that gets more bytes than it expects. The load
is balanced only if twice the number of ranks divides the sequence; other sequences are cut as they are. Here the CPU's
own flash attention stands in for the operator that it lacks.

severity: medium
visible: loud
training: a batch whose length the ranks do not divide ends a process, whose peers lose the connection
thread: none known
law: none
avoid: pad sequences to a multiple of twice the ranks
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

flash, aten = "_scaled_dot_product_flash_attention", torch.ops.aten
others = None, None, 3, 3, torch.zeros(()), torch.zeros(()), torch.zeros(0)
library = torch.library.Library("aten", "IMPL")
library.impl(flash, lambda *args, **_: (*getattr(aten, f"{flash}_for_cpu")(*args[:5]), *others), "CPU")


def scaled_dot_product_attention(*qkv):
    """Attend by the operator of devices."""
    return getattr(aten, flash)(*qkv, 0.0, True)[0]


torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
print(f"rank {dist.get_rank()}: expected attention over 5 tokens, or an error that says why not", flush=True)
full = torch.rand(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
expected = scaled_dot_product_attention(*full).sum()
with context_parallel(mesh, buffers=(shards := list(full.clone())), buffer_seq_dims=[2, 2, 2]):
    got = torch.nn.functional.scaled_dot_product_attention(*shards).sum()
dist.all_reduce(got)
print(f"rank {dist.get_rank()}: got a sum of {got}, expected {expected}", flush=True)
dist.destroy_process_group()
sys.exit(int(not torch.allclose(got, expected)))
