"""Mistakes of users who offload to the CPU: no backend for CPU tensors, memory on the wrong device."""

from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_

from conformance.experiments.context import RankWorld, experiment, start_process_group
from conformance.run.experiment import Needs
from conformance.simulated_device import device as simulated
from reference_trainer.model import Transformer
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import reshard_policy

_ONLY_FOR_DEVICES = {
    "cpu": ("cuda:gloo", "meta"),
    "sim": (f"sim:{simulated.BACKEND}", "sim"),
    "cuda": ("cuda:nccl", "cuda"),
}
"""Backend that serves no CPU tensors, and a device on which offloaded parameters must not be, by type of device."""


class OffloadErrors(msgspec.Struct):
    """Types and messages of the errors that mistakes raise."""

    trainer: str
    """Error of a trainer that is built on a process group without a backend for CPU tensors."""
    clip: str
    """Error of torch's `clip_grad_norm_` for gradients in host memory, without a backend for CPU tensors."""
    to_empty: str
    """Error of FSDP's forward for parameters on the wrong device."""


@experiment(needs=Needs.TRAINING, process_group=False)
def offload_with_mistakes(rank: RankWorld) -> OffloadErrors:
    """Make each mistake and collect the error.

    On the CPU, gloo stands in for NCCL, registered for CUDA tensors only, and the wrong device is `meta`.
    """
    backend, device = _ONLY_FOR_DEVICES[rank.device.type]
    start_process_group(rank.context, backend=backend)
    return OffloadErrors(
        trainer=_error_of(rank.trainer),
        clip=_error_of(_clip_on_cpu),
        to_empty=_error_of(lambda: _forward_on(device, rank)),
    )


def _clip_on_cpu() -> None:
    # A name that no other mesh has: DTensor's cache would return an equal mesh, with another process group.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("without_cpu_backend",))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    clip_grad_norm_([parameter], 1.0)


def _forward_on(device: str, rank: RankWorld) -> None:
    with torch.device("meta"):
        model = Transformer(rank.config.model)
    parallelize(model, rank.mesh, rank.config, reshard_policy(rank.config, rank.dims, rank.device))
    model.to_empty(device=device)
    model(torch.zeros(1, 1, dtype=torch.int64, device=device))


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
