"""Trainers for the simulated accelerator: right ones that use streams, and others that are wrong in one thing each."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from conformance.subjects import ParallelConfig, subject
from conformance.subjects.decorated import FunctionSubject, clip_with_torch

WIDTH, CLASSES, SAMPLES = 32, 8, 6
DEVICE = torch.accelerator.current_accelerator()
"""Accelerator as a program asks for it when it is imported."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.middle = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.middle(self.up(x))))  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def shard(model: Any, mesh: DeviceMesh, config: ParallelConfig, **options: Any) -> nn.Module:
    options = {"offload_policy": config.offload_policy, **options}
    for layer in (model.up, model.middle, model.down):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model  # type: ignore[no-any-return]


declare = partial(subject, model=Model, loss=loss, batch=batch, meshes=["dp2", "hsdp2x2"], offload=True)
right = declare()(shard)


@declare()
def own_mesh(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Make meshes of the accelerator that the program has found when it was imported."""
    assert DEVICE is not None
    return shard(model, init_device_mesh(DEVICE.type, (mesh.size(),)), config)


# Streams of its own


def side_stream() -> tuple[Any, torch.Stream, torch.Stream]:
    """Return the module of the accelerator, its current stream, and a new one."""
    assert DEVICE is not None
    module = torch.get_device_module(DEVICE)
    return module, module.current_stream(), module.Stream()


def clip_on_side_stream(parameters: Iterable[nn.Parameter], max_norm: float, *, awaited: bool) -> Tensor:
    """Scale gradients on another stream, for which the optimizer waits or not."""
    held = list(parameters)
    norm = clip_with_torch(held, float("inf"))
    module, current, side = side_stream()
    side.wait_stream(current)
    with module.stream(side):
        torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    if awaited:
        current.wait_stream(side)
    return norm


clip_awaited = declare(clip=partial(clip_on_side_stream, awaited=True))(shard)
clip_not_awaited = declare(clip=partial(clip_on_side_stream, awaited=False))(shard)


def loss_of_copies(model: nn.Module, batch: tuple[Tensor, Tensor], *, recorded: bool) -> Tensor:
    """Copy inputs on another stream, as loaders do, and tell the allocator of their use on the current one, or not.

    The copy of the second half may be given the memory of the first, which the current stream may not have read yet.
    """
    if batch[0].is_cpu:
        return loss(model, batch)
    module, current, side = side_stream()
    side.wait_stream(current)
    halves = []
    for half in batch[0].chunk(2):
        with module.stream(side):
            inputs = half.clone()
        current.wait_stream(side)
        if recorded:
            inputs.record_stream(current)
        halves.append(inputs * 1.0)
        del inputs
    return loss(model, (torch.cat(halves), batch[1]))


copied_ahead = declare(loss=partial(loss_of_copies, recorded=True))(shard)
copies_not_recorded = declare(loss=partial(loss_of_copies, recorded=False))(shard)


# Memory


@declare()
def activations_wait_for_a_stream(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Tell the allocator that another stream uses the results of both layers, which none does."""
    sharded = shard(model, mesh, config)
    _, current, side = side_stream()

    def record(_layer: nn.Module, _inputs: Any, result: Tensor) -> None:
        side.wait_stream(current)
        result.record_stream(side)

    for layer in (model.up, model.down):
        layer.register_forward_hook(record)
    return sharded


kept: list[object] = []


@declare()
def full_weights_stay(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    kept[:] = [{name: parameter.detach().clone() for name, parameter in model.named_parameters()}]
    return shard(model, mesh, config)


@declare()
def group_stays_gathered(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    sharded = shard(model, mesh, config)
    model.up.set_reshard_after_backward(False)
    return sharded


@declare()
def kept_between_passes(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Reshard after backward alone, which is right."""
    return shard(model, mesh, config, reshard_after_forward=False)


def clip_and_keep(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    held = [*parameters]
    kept.append([p.grad.to_local().clone() for p in held if isinstance(p.grad, DTensor)])
    return clip_with_torch(held, max_norm)


gradients_kept = declare(clip=clip_and_keep)(shard)


@declare()
def not_offloaded(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    return shard(model, mesh, ParallelConfig(config.mesh, config.precision, on_meta=config.on_meta))


# Devices by name


def with_mesh_of(device_type: str) -> FunctionSubject:
    @declare()
    def parallelize(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
        own = init_device_mesh(device_type, (mesh.size(),))  # the line that names a device
        return shard(model, own, config)

    return parallelize


mesh_of_cpu, mesh_of_cuda = with_mesh_of("cpu"), with_mesh_of("cuda")


class OnCpu(FunctionSubject):
    """Adapter that builds its run on the CPU, also if it is given another device."""

    def build(self, cell: Any, *, device: torch.device, max_norm: float) -> Any:
        return super().build(cell, device=torch.device("cpu"), max_norm=max_norm)


on_cpu = OnCpu(**{name: getattr(right, name) for name in right.__dataclass_fields__})


def batch_on_cuda(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(model, (batch[0].to("cuda"), batch[1]) if not batch[0].is_cpu else batch)


moves_to_cuda = declare(loss=batch_on_cuda)(shard)
