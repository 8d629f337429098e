"""Functions that are wrong in what they communicate, and functions that are right and communicate unlike others."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.decorated import FunctionSubject, clip_with_torch
from tests.support.subject_models import WIDTH, LateLoop, Model, batch, fields_of, in_fp32, loss, own_mesh_names, shard


class Repeated(Model):
    """A layer that computes twice in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.table.real.to(x.dtype)
        out: Tensor = self.down(gelu(self.up(x)) + gelu(self.up(-x)))
        return out


@subject(model=Repeated, loss=loss, batch=batch)
def layer_that_computes_twice(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config)


class Unused(Model):
    """A layer that no forward pass computes."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


@subject(model=Unused, loss=loss, batch=batch)
def unused_layer_in_a_group_of_its_own(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    fully_shard(model.unused, mesh=mesh)
    return shard(model, mesh, config)


@in_fp32
def layer_gathered_twice(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    sharded = shard(model, mesh, config)
    model.up.register_forward_hook(lambda module, *_: module.unshard())
    return sharded


@in_fp32
def kept_after_backward(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    sharded = shard(model, mesh, config)
    model.set_reshard_after_backward(False)
    return sharded


@subject(model=Model, loss=loss, batch=batch, meshes=["dp2", "hsdp2x2"])
def layer_not_reduced_over_replicas(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    sharded = shard(model, mesh, config)
    model.up.register_forward_pre_hook(lambda module, _: module.set_requires_all_reduce(False))
    return sharded


@in_fp32
def reduced_in_bf16(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def clip_full_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    held = list(parameters)
    norm: Tensor = torch.stack([p.grad.full_tensor().norm() for p in held if isinstance(p.grad, DTensor)]).norm()
    torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    return norm


@subject(model=Model, loss=loss, batch=batch, clip=clip_full_gradients)
def gradients_gathered_to_clip(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config)


def clip_after_other_sums(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip as torch does, after an all-reduce whose operation depends on the rank; gloo does not notice."""
    dist.all_reduce(torch.ones(1), op=(dist.ReduceOp.MAX, dist.ReduceOp.SUM)[dist.get_rank()])
    return clip_with_torch(parameters, max_norm)


@subject(model=Model, loss=loss, batch=batch, clip=clip_after_other_sums)
def ranks_reduce_differently(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, config)


class PhaselessLoop(LateLoop):
    """Run that tells nothing of its phases."""

    def train(self, steps: Any, observer: Any) -> list[float]:
        observer.phase = lambda _name, *, step: None
        return super().train(steps, observer)


class PhaselessSubject(FunctionSubject):
    def build(self, *args: Any, **kwargs: Any) -> Any:
        return PhaselessLoop(super().build(*args, **kwargs), tells=True)


without_phases = PhaselessSubject(**fields_of(own_mesh_names))
