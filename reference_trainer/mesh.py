"""Process group, device and device mesh of a process."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reference_trainer.checks import require
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_RELEASE = Version(str(torch.__version__)).release[:2]
_DROP_LAST_TENSORS_S = 0.2
_BOTH_BACKENDS = "cpu:gloo,cuda:nccl"


def choose_device(config: TrainerConfig) -> torch.device:
    """Return the device of this process, and make it the current one.

    Raises UsageError if CUDA is asked for and absent, or has too few devices, and if FSDP2 does not run on the CPU.
    """
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
    # All processes of the node are counted, so that all of them find the same mistake.
    processes = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    require(
        processes <= cuda_devices,
        f"device is {config.device}: {processes} processes on this node, but torch finds {cuda_devices} CUDA devices: "
        "start one process per device, or use device=cpu",
    )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def backends(device: torch.device, *, cpu_tensors: bool) -> str:
    """Return the backends for `init_process_group`: NCCL for tensors on a CUDA device, gloo for those on the CPU.

    With `cpu_tensors`, a process on a CUDA device communicates tensors on the CPU as well. That costs a connection
    between each two processes for every group, so ask for it only if there are such tensors.
    """
    if device.type == "cpu":
        return "gloo"
    return _BOTH_BACKENDS if cpu_tensors else "nccl"


def check_device(config: TrainerConfig, device: torch.device) -> None:
    """Raise UsageError for options that need another device: page-locked memory, and TF32."""
    require(
        not config.pin_memory or device.type != "cpu",
        "pin_memory is for copies to an accelerator, but this run is on the CPU: set pin_memory=false",
    )
    require(
        not config.tf32 or device.type == "cuda",
        f"tf32 is what CUDA devices compute products with, but this run is on device {device.type}: set tf32=false",
    )


def set_tf32(config: TrainerConfig, device: torch.device) -> None:
    """Switch TF32 on or off for all matrix products of this process on a CUDA device.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32


def check_offload(config: TrainerConfig, device: torch.device) -> None:
    """Raise UsageError for offloading that this device or the default process group does not allow.

    Without this check the first to fail is the norm of offloaded gradients, after forward and backward of the first
    step: https://github.com/pytorch/pytorch/issues/148532.
    """
    check_device(config, device)
    if config.offload == "none":
        return
    group = dist.get_backend_config()
    require(
        "cpu" in (entry.partition(":")[0] for entry in group.split(",")),
        f"offload cpu: gradients are in host memory and clipped there, but the process group ({group}) has no backend "
        f'for CPU tensors: write torch.distributed.init_process_group("{_BOTH_BACKENDS}")',
    )


def init_process_group(backend: str, *, init_method: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialise the default process group; `backend` is a result of `backends`."""
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def destroy_process_group() -> None:
    """Destroy the default process group.

    Up to torch 2.7 gloo's threads are joined while the interpreter's lock is held. A thread that is about to drop the
    last reference to a tensor of a finished collective needs that lock, and both wait forever
    (https://github.com/pytorch/pytorch/pull/154976): a short sleep lets the thread finish first.
    """
    if _RELEASE < (2, 8):
        time.sleep(_DROP_LAST_TENSORS_S)
    dist.destroy_process_group()


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """Build the device mesh, a collective call: one dimension for each degree of `ParallelDims.mesh_shape`."""
    shape = dims.mesh_shape()
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def build_expert_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """Build the mesh of experts, a collective call: the same ranks as in the mesh of all other parameters."""
    shape = dims.expert_mesh_shape()
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def build_context_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """Build the mesh whose dimension `cp` has the ranks that share samples, a collective call."""
    shape = dims.context_mesh_shape()
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one- or (HSDP) two-dimensional submesh over which `fully_shard` works, of either mesh."""
    names = mesh.mesh_dim_names or ()
    shard = "expert_shard" if "expert_shard" in names else "dp_shard"
    return mesh["dp_replicate", shard] if "dp_replicate" in names else mesh[shard]


def degree(mesh: DeviceMesh, name: str) -> int:
    """Return the number of ranks along a dimension, 1 if the mesh has no such dimension.

    `mesh[name].size()` says the same, but each slice of a mesh leaves a context variable behind for ever in torch 2.14
    and 2.15 (findings/slices_of_meshes_are_kept.py): until no supported torch does so, steps do without slices.
    """
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def dp_rank(mesh: DeviceMesh) -> int:
    """Return this process's index among the ranks that see different tokens."""
    names = mesh.mesh_dim_names or ()
    replicate = mesh.get_local_rank("dp_replicate") if "dp_replicate" in names else 0
    return replicate * degree(mesh, "dp_shard") + mesh.get_local_rank("dp_shard")
