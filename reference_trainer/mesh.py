"""Process group and device mesh."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reference_trainer.checks import require
from reference_trainer.config import MeshConfig, TrainerConfig

_RELEASE = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
_DROP_LAST_TENSORS_S = 0.2


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a run; the mesh has one dimension for each that is used, and always `dp_shard`."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Number of ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    def mesh_shape(self) -> dict[str, int]:
        degrees = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: degree for name, degree in degrees.items() if degree > 1 or name == "dp_shard"}


def resolve_mesh(mesh: MeshConfig, *, world_size: int) -> ParallelDims:
    """Fit the configured degrees to the number of processes. Raises ValueError where they do not fit."""
    others = mesh.dp_replicate * mesh.tp
    dp_shard = mesh.dp_shard if mesh.dp_shard != "auto" else max(1, world_size // others)
    dims = ParallelDims(dp_replicate=mesh.dp_replicate, dp_shard=dp_shard, tp=mesh.tp)
    require(
        dims.world_size == world_size,
        f"mesh dp_replicate {dims.dp_replicate} x dp_shard {mesh.dp_shard} x tp {dims.tp} does not fit the number of "
        f"processes, {world_size}: start {dims.world_size} processes, or change mesh.dp_shard, mesh.tp",
    )
    return dims


def check_fits_mesh(config: TrainerConfig, dims: ParallelDims) -> None:
    """Raises ValueError for what does not go with this mesh: sizes that it cannot divide, options without effect."""
    model, data = config.model, config.data
    for name, heads in (("n_heads", model.n_heads), ("n_kv_heads", model.n_kv_heads)):
        require(heads % dims.tp == 0, f"model.{name} {heads} is not divisible by mesh.tp {dims.tp}")
    require(model.ffn_dim % dims.tp == 0, f"model.ffn_dim {model.ffn_dim} is not divisible by mesh.tp {dims.tp}")
    if config.sequence_parallel:
        require(data.seq_len % dims.tp == 0, f"data.seq_len {data.seq_len} is not divisible by mesh.tp {dims.tp}")
    parts = dims.dp * config.accumulation
    require(
        data.global_batch_size % parts == 0,
        f"data.global_batch_size {data.global_batch_size} is not divisible by data-parallel ranks x accumulation "
        f"= {dims.dp} x {config.accumulation}",
    )
    require(
        config.implementation == "fsdp2" or dims.dp_shard > 1,
        "implementation fsdp1 does not shard over mesh.dp_shard 1: use more ranks, or implementation fsdp2",
    )
    require(
        config.gradient_sync != "all-reduce-last" or dims.dp_replicate > 1,
        "gradient_sync all-reduce-last needs replicas (HSDP), whose all-reduce it postpones, but mesh.dp_replicate is "
        f"{dims.dp_replicate}: set mesh.dp_replicate above 1, or use gradient_sync each or last",
    )


def choose_device(config: TrainerConfig) -> torch.device:
    """The device of this process. Raises ValueError if CUDA is asked for and absent, or has too few devices."""
    cuda_devices = torch.cuda.device_count() if config.device != "cpu" else 0
    require(
        config.device != "cuda" or cuda_devices > 0, "device is cuda, but torch finds no CUDA device: use device=cpu"
    )
    if not cuda_devices:
        require(
            hasattr(torch.cpu.Stream, "record_event") or config.implementation != "fsdp2",
            f"device is cpu, but FSDP2 runs on the CPU from torch 2.7 on, and this is {torch.__version__} "
            "(https://github.com/pytorch/pytorch/pull/145935): use another torch, or a CUDA device",
        )
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # Of the node, not of this process alone: all of its processes find the same mistake.
    processes = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    require(
        processes <= cuda_devices,
        f"device is {config.device}: {processes} processes on this node, but torch finds {cuda_devices} CUDA devices: "
        "start one process per device, or use device=cpu",
    )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


_BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def backends(device: torch.device, *, cpu_tensors: bool) -> str:
    """For `init_process_group`: NCCL for tensors on a CUDA device, gloo for those on the CPU.

    `cpu_tensors`: on a CUDA device, tensors on the CPU are communicated as well. That costs a connection between each
    two processes for every group, so it is not done without need.
    """
    if device.type == "cpu":
        return "gloo"
    return _BOTH_BACKENDS if cpu_tensors else "nccl"


def check_device(config: TrainerConfig, device: torch.device) -> None:
    """Raises ValueError for what takes another device: page-locked memory to copy from, and rounded products."""
    require(
        not config.pin_memory or device.type != "cpu",
        "pin_memory is for copies to an accelerator, but this run is on the CPU: set pin_memory=false",
    )
    require(
        not config.tf32 or device.type == "cuda",
        f"tf32 is what CUDA devices compute products with, but this run is on device {device.type}: set tf32=false",
    )


def set_tf32(config: TrainerConfig, device: torch.device) -> None:
    """For all matrix products of this process, https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32


def check_offload(config: TrainerConfig, device: torch.device) -> None:
    """Raises ValueError for offloading that this device or the default process group does not allow.

    Otherwise the first that fails is the norm of offloaded gradients, after forward and backward of the first step:
    https://github.com/pytorch/pytorch/issues/148532.
    """
    check_device(config, device)
    if config.offload == "none":
        return
    found = dist.get_backend_config()
    require(
        "cpu" in (entry.partition(":")[0] for entry in found.split(",")),
        f"offload cpu: gradients are in host memory and clipped there, but the process group ({found}) has no backend "
        f'for CPU tensors: write torch.distributed.init_process_group("{_BOTH_BACKENDS}")',
    )


def init_process_group(backend: str, *, init_method: str, rank: int, world_size: int, timeout_s: float) -> None:
    """The default process group, with what `backends` says."""
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def destroy_process_group() -> None:
    """Ends what `init_process_group` has begun.

    Up to torch 2.7 gloo's threads are joined while the interpreter's lock is held. One of them that is about to drop
    the last reference to a tensor of a finished collective needs that lock, and both wait for ever
    (https://github.com/pytorch/pytorch/pull/154976): it gets a moment to do so before.
    """
    if _RELEASE < (2, 8):
        time.sleep(_DROP_LAST_TENSORS_S)
    dist.destroy_process_group()


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    shape = dims.mesh_shape()
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The one- or (HSDP) two-dimensional part of the mesh over which `fully_shard` works."""
    names = mesh.mesh_dim_names or ()
    return mesh["dp_replicate", "dp_shard"] if "dp_replicate" in names else mesh["dp_shard"]


def dp_rank(mesh: DeviceMesh) -> int:
    """This process's index among the ranks that see different data."""
    names = mesh.mesh_dim_names or ()
    replicate = mesh.get_local_rank("dp_replicate") if "dp_replicate" in names else 0
    return replicate * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
