"""Environment probe: are the suite's own preconditions met on this machine?"""

import os
import platform
import time
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

# Renamed in torch 2.12; the old names warn since.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PINNED = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables on which the last bits of a device's results depend, or its allocator."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def probe_environment(device: torch.device) -> dict[str, Any]:
    """Facts of one rank, in builtin types: software, threads, memory, clock, and collectives on numbers on `device`."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "grad_enabled": torch.is_grad_enabled(),
        "available_memory_bytes": psutil.virtual_memory().available,
        "backend": dist.get_backend_config(),
        "device": device.type,
        "pinned": {name: os.environ.get(name) for name in _PINNED},
        "pid": os.getpid(),
        "monotonic_s": _synchronised_clock(),
        "collectives": {str(dtype).removeprefix("torch."): _collectives(dtype, device) for dtype in DTYPES},
        "bf16_sum": _bf16_sum(device),
    }


def _synchronised_clock() -> float:
    dist.all_reduce(torch.zeros(1, dtype=torch.float32))  # among hosts: all leave it at once
    return time.monotonic()


def _collectives(dtype: torch.dtype, device: torch.device) -> dict[str, list[float]]:
    """Results of the collectives on `rank + 1`, `rank + 2`, ...: small integers, exact in every dtype."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = (torch.arange(world, device=device) + rank + 1).to(dtype)
    reduced, gathered, scattered = mine.clone(), mine.new_empty(world * world), mine.new_empty(1)
    dist.all_reduce(reduced)
    _all_gather(gathered, mine)
    _reduce_scatter(scattered, mine.clone())
    copied = mine.clone()
    dist.broadcast(copied, src=world - 1)
    results = {"all_reduce": reduced, "all_gather": gathered, "reduce_scatter": scattered, "broadcast": copied}
    return {name: tensor.double().tolist() for name, tensor in results.items()}


def _bf16_sum(device: torch.device) -> dict[str, list[float]]:
    """Random bf16 numbers of this rank as `terms`, and their `total` over all ranks: it shows the order of the sum."""
    numel = 64 * dist.get_world_size()
    terms = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
    total = terms.to(device, copy=True)
    dist.all_reduce(total)
    return {"terms": terms.tolist(), "total": total.tolist()}
