"""Facts about the machine, the backend and the device of each rank, for the laws on the suite's preconditions."""

import os
import platform
import time

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.memory import allocator_bytes
from conformance.numerics.knobs import pinned_knobs
from conformance.run.devices.hardware import DETERMINISM
from conformance.run.devices.nvml import foreign_processes, machine_devices, sees_process
from conformance.run.experiment import Needs

# Renamed in torch 2.12, in which the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SAMPLED_NUMELS = (64, 101)
"""Elements for each rank; libraries that align chunks of a tensor do so with the second alone."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


class SampledSum(msgspec.Struct):
    """Sum over ranks whose rounding shows the order in which the backend adds."""

    terms: list[float]
    """Numbers of this rank, each exact in bf16."""
    total: list[float]
    """Sums of the numbers over all ranks, computed in bf16."""


class RankEnvironment(msgspec.Struct):
    """Software, state, memory and clock of one rank, and results of collectives there."""

    torch: str
    python: str
    numpy: str
    threads: int
    default_dtype: str
    grad_enabled: bool
    available_memory_bytes: int
    backend: str
    """Configuration of the process group's backends."""
    pid: int
    monotonic_s: float
    """Monotonic clock after a collective that all ranks leave at the same time."""
    collectives: dict[str, dict[str, list[float]]]
    """Results of collectives on `rank + 1`, `rank + 2`, ..., exact in every dtype, by dtype and kind."""
    kernel_type: str
    """Type of the device whose kernels compute, `cpu` or `cuda`."""
    bf16_sums: list[SampledSum]
    """All-reduced sums of tensors of several sizes."""


class DeviceSurroundings(msgspec.Struct):
    """State of one rank's CUDA device, and memory that libraries allocate there for themselves."""

    foreign_processes: list[int]
    """Ids of processes of other sessions on the device."""
    sees_itself: bool
    """True if the rank, which computes on the device, is among the processes there."""
    pinned: dict[str, bool]
    """True for each knob that is set as bitwise determinism needs it, by name of the knob."""
    cublas_workspace_bytes: int
    nccl_buffer_bytes: int
    free_bytes: int


@experiment(needs=Needs.NOTHING)
def probe(rank: RankWorld) -> RankEnvironment:
    """Collect facts about a rank's environment, and try collectives on its device."""
    return RankEnvironment(
        torch=str(torch.__version__),
        python=platform.python_version(),
        numpy=np.__version__,
        threads=torch.get_num_threads(),
        default_dtype=str(torch.get_default_dtype()),
        grad_enabled=torch.is_grad_enabled(),
        available_memory_bytes=psutil.virtual_memory().available,
        backend=dist.get_backend_config(),
        pid=os.getpid(),
        monotonic_s=_synchronised_clock_s(),
        collectives={str(dtype).removeprefix("torch."): _collectives(dtype, rank.device) for dtype in DTYPES},
        kernel_type="cuda" if rank.device.type == "cuda" else "cpu",
        bf16_sums=[_bf16_sum(numel * rank.size, rank.device) for numel in _SAMPLED_NUMELS],
    )


def _synchronised_clock_s() -> float:
    dist.all_reduce(torch.zeros(1, dtype=torch.float32))  # on the CPU: all ranks leave at once
    return time.monotonic()


def _collectives(dtype: torch.dtype, device: torch.device) -> dict[str, list[float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = (torch.arange(world, device=device) + rank + 1).to(dtype)
    reduced, gathered, scattered = numbers.clone(), numbers.new_empty(world * world), numbers.new_empty(1)
    dist.all_reduce(reduced)
    _all_gather(gathered, numbers)
    _reduce_scatter(scattered, numbers.clone())
    copied = numbers.clone()
    dist.broadcast(copied, src=world - 1)
    results = {"all_reduce": reduced, "all_gather": gathered, "reduce_scatter": scattered, "broadcast": copied}
    return {kind: tensor.double().tolist() for kind, tensor in results.items()}


def _bf16_sum(numel: int, device: torch.device) -> SampledSum:
    terms = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(torch.bfloat16)
    total = terms.to(device, copy=True)
    dist.all_reduce(total)
    return SampledSum(terms=terms.tolist(), total=total.tolist())


@experiment(needs=Needs.NOTHING)
def surroundings(rank: RankWorld) -> DeviceSurroundings:
    """Collect facts about a rank's CUDA device: other processes, knobs, memory of cuBLAS and NCCL."""
    device, uuid, devices = rank.device, rank.context.device, machine_devices()
    before = allocator_bytes(device, "current")["allocated"]
    torch.mm(torch.ones(128, 128, device=device), torch.ones(128, 128, device=device))
    workspace_bytes = allocator_bytes(device, "current")["allocated"] - before
    torch.cuda.synchronize(device)
    used_bytes = devices.used_bytes(uuid)
    dist.all_reduce(torch.ones(1 << 20, device=device))
    torch.cuda.synchronize(device)
    return DeviceSurroundings(
        foreign_processes=foreign_processes(devices, uuid),
        sees_itself=sees_process(devices, uuid, os.getpid()),
        pinned=pinned_knobs(device) | pinned_variables(),
        cublas_workspace_bytes=workspace_bytes,
        nccl_buffer_bytes=devices.used_bytes(uuid) - used_bytes,
        free_bytes=torch.cuda.mem_get_info(device)[0],
    )


def pinned_variables() -> dict[str, bool]:
    """Return whether this process has each variable of cuBLAS and NCCL as bitwise determinism needs it."""
    return {name: os.environ.get(name) == value for name, value in DETERMINISM.items()}
