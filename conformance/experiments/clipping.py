"""What ranks measure of clipping outside of a training run: bad numbers, and mistakes."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_

from conformance.defects.catalogue import injected
from conformance.experiments.context import device_of, start_process_group
from conformance.experiments.training import rank_config
from conformance.instruments.sharding import local
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import build_mesh, destroy_process_group, init_process_group
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import ReshardPolicy, reshard_policy
from reference_trainer.train import Trainer


class Enough(Exception):
    """All that is of interest has happened: no collective follows that a rank could wait in for another."""


def clip_what_is_not_finite(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """Spoil gradients of the last rank and clip them; for each situation, whether that raised, and what the norm was.

    A situation is `raise` or `go-on` (what the trainer is told to do), the moment, and the value: `raise/backward/nan`.
    """
    config = rank_config(context, payload)
    outcomes: dict[str, dict[str, bool]] = {}
    with injected(payload["defect"]):
        device = start_process_group(context)
        for does in ("raise", "go-on"):
            optimizer = replace(config.optimizer, error_if_nonfinite=does == "raise")
            spoiler = _Spoiler(active=context.rank == context.world_size - 1)
            trainer = trainer_with(context, device, replace(config, optimizer=optimizer), spoiler)
            for moment in ("backward", "reduced"):
                for value in (math.nan, math.inf):
                    spoiler.moment, spoiler.value = moment, value
                    outcomes[f"{does}/{moment}/{value}"] = {
                        "raised": _raises(trainer),
                        "norm_is_finite": spoiler.norm_is_finite,
                    }
                    trainer.optimizer.zero_grad()
        destroy_process_group()
    return outcomes


class _Spoiler(Observer):
    """Puts a bad number into this rank's gradients, in backward of the first block or after they were reduced."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self.moment, self.value = "", 0.0
        self.norm_is_finite = True

    def initialized(self, model: Transformer) -> None:
        model.layers[0].register_forward_hook(self._spoil_backward)

    def gradients(self, model: Transformer, *, step: int) -> None:
        if self._active and self.moment == "reduced":
            parts = (local(p.grad) for p in model.parameters() if p.grad is not None)
            next(part for part in parts if part.numel()).view(-1)[0] = self.value

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        self.norm_is_finite = bool(norm.isfinite())
        raise Enough

    def _spoil_backward(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._active and self.moment == "backward":
            output.register_hook(self._bad)  # type: ignore[no-untyped-call]

    def _bad(self, grad: Tensor) -> Tensor:
        return torch.full_like(grad, self.value)


def _raises(trainer: Trainer) -> bool:
    """Whether clipping in the first step raises because of a number that is not finite."""
    try:
        trainer.train_step(0)
    except Enough:
        return False
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return True
    raise RuntimeError("a step has ended without clipping")


def offload_with_mistakes(context: RankContext, payload: dict[str, Any]) -> dict[str, str]:
    """What is raised where the process group has no backend for CPU tensors, or memory is given on the wrong device.

    By `trainer` (built on that process group), `clip` (torch's, of gradients in host memory), `to_empty` (FSDP's
    forward). On the CPU gloo takes the part of NCCL, registered for CUDA tensors alone, and the wrong device is `meta`.
    """
    config = rank_config(context, payload)
    device = device_of(context)
    cuda = device.type == "cuda"
    with injected(payload["defect"]):
        init_process_group(
            "cuda:nccl" if cuda else "cuda:gloo",
            init_method=context.rendezvous,
            rank=context.rank,
            world_size=context.world_size,
            timeout_s=context.timeout_s,
        )
        dims = resolve_mesh(config.mesh, world_size=context.world_size)
        mesh, policy = build_mesh(dims, device), reshard_policy(config, dims, device)
        messages = {
            "trainer": _message_of(lambda: trainer_with(context, device, config, Observer())),
            "clip": _message_of(_clip_on_cpu),
            "to_empty": _message_of(lambda: _forward_on("cuda" if cuda else "meta", config, mesh, policy)),
        }
        destroy_process_group()
    return messages


def _clip_on_cpu() -> None:
    # A name that no other mesh has: DTensor's cached results hold the mesh of an equal one, with its process group.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("without_cpu_backend",))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    clip_grad_norm_([parameter], 1.0)


def _forward_on(device: str, config: TrainerConfig, mesh: DeviceMesh, policy: ReshardPolicy) -> None:
    with torch.device("meta"):
        model = Transformer(config.model)
    parallelize(model, mesh, config, policy)
    model.to_empty(device=device)
    model(torch.zeros(1, 1, dtype=torch.int64, device=device))


def _message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def trainer_with(context: RankContext, device: torch.device, config: TrainerConfig, observer: Observer) -> Trainer:
    """A trainer of this rank, in the process group that it has started."""
    return Trainer(config, device=device, world_size=context.world_size, observer=observer)
