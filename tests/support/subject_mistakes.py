"""Trainers that take steps by themselves, with one mistake each, as owners make them; `right` has none."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import dropout
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer

from conformance.subjects import ParallelConfig
from conformance.subjects.decorated import FunctionSubject, sgd
from conformance.subjects.loop import Loop, plain
from conformance.subjects.protocol import Batch, StepObserver
from tests.support.subject_models import (
    WIDTH,
    Model,
    Tied,
    changed,
    clip_locally,
    declare,
    frozen_layer,
    loss,
    shard,
    untied,
    without_gradient,
)


class OwnLoop:
    """One rank that trains; a mistake replaces a method."""

    def __init__(self, made: Loop) -> None:
        self.model, self.optimizer, self.data = made.model, made.optimizer, made.data
        self.data_rank, self._clip = made.data_rank, made.clip
        self.count = made.count

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float:
        counts = [float(self.count(each)) for each in micro_batches]
        total = self.data.total(sum(counts))
        loss_sum = 0.0
        for index, each in enumerate(micro_batches):
            self.synchronise(step, is_last=index == len(micro_batches) - 1)
            self.begin(step, index)
            observer.phase("forward", step=step)
            summed = loss(self.model, each)
            observer.phase("backward", step=step)
            torch.autograd.backward(summed * self.scale(counts, index, total))
            loss_sum += float(summed.detach())
        self.reduced()
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = self.clip()
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.end()
        observer.phase("idle", step=step)
        return self.data.total(loss_sum) / total

    def synchronise(self, step: int, *, is_last: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(self.is_synchronised(step, is_last=is_last), recurse=False)

    def is_synchronised(self, step: int, *, is_last: bool) -> bool:
        return is_last

    def begin(self, step: int, index: int) -> None:
        """Prepare a forward pass."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return self.data.ranks / total

    def reduced(self) -> None:
        """Change reduced gradients."""

    def clip(self) -> Tensor:
        return self._clip(self.model.parameters())

    def end(self) -> None:
        self.optimizer.zero_grad()


def owner(*, parallelize: Callable[..., Any] = shard, **options: Any) -> FunctionSubject:
    """Return the subject of a loop; on two ranks, and on four with copies."""
    return mistaken(declare(meshes=["dp2", "hsdp2x2"], **options)(parallelize))


def mistaken(subject: FunctionSubject | None = None, **methods: Callable[..., Any]) -> FunctionSubject:
    """Return a subject, by default that of `right`, with other methods of its loop."""
    loop = type("Mistaken", (OwnLoop,), methods)
    return changed(subject or declare(meshes=["dp2", "hsdp2x2"])(shard), loop)


right = owner()


def clip_with_copies(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip by the root of the squares of all ranks, those of copies included."""
    gradients = [local(each.grad) for each in parameters if each.grad is not None]
    total = torch.stack([each.square().sum() for each in gradients]).sum()
    dist.all_reduce(total)
    for gradient in gradients:
        gradient.mul_(float((max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)))
    return total.sqrt()


def clip_one_by_one(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip as torch does, which refuses plain tensors beside DTensors."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm: Tensor = torch.stack([plain(torch.linalg.vector_norm(each)) for each in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(float((max_norm / (norm + 1e-6)).clamp(max=1.0)))
    return norm


def clip_layer_by_layer(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip weight and bias of each layer by a separate norm."""
    given = [*parameters]
    norms = [clip_grad_norm_(given[first : first + 2], max_norm) for first in range(0, len(given), 2)]
    return norms[-1]


def clip_without_first_layer(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    return clip_grad_norm_([*parameters][2:], max_norm)


def clip_by_last_layer(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip all gradients by the norm of those of the last layer."""
    given = [*parameters]
    norm = get_total_norm([each.grad for each in given[-2:] if each.grad is not None])
    clip_grads_with_norm_(given, max_norm, norm)
    return norm


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def reduce_again(name: str) -> Callable[[OwnLoop], None]:
    """Return a method that reduces a gradient once more."""

    def reduced(loop: OwnLoop) -> None:
        gradient = loop.model.get_parameter(name).grad
        assert gradient is not None
        dist.all_reduce(local(gradient))

    return reduced


def clip_twice(loop: OwnLoop) -> Tensor:
    norm = plain(OwnLoop.clip(loop))
    after = plain(clip_grad_norm_(loop.model.parameters(), float("inf")))
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(float(after / norm))
    return norm


def leave_out_a_collective(_loop: OwnLoop) -> None:
    """Leave out the first of two collectives on rank 1."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(64))
    dist.barrier()


def raise_in_second_step(_loop: OwnLoop, step: int, _index: int) -> None:
    if step == 1:
        warmup({})


def warmup(options: dict[str, int]) -> int:
    return options["warmup"]


local_tokens = mistaken(scale=lambda _loop, counts, _index, _total: 1.0 / sum(counts))
micro_batch_means = mistaken(scale=lambda _loop, counts, index, _total: 1.0 / counts[index] / len(counts))
means_of_all_ranks = mistaken(
    scale=lambda loop, counts, index, _total: loop.data.ranks / loop.data.total(counts[index]) / len(counts)
)
not_divided_by_micro_batches = mistaken(scale=lambda _loop, counts, index, _total: 1.0 / counts[index])
sum_of_ranks = mistaken(scale=lambda loop, _counts, _index, total: loop.data.ranks**2 / total)
divided_twice = mistaken(scale=lambda _loop, _counts, _index, total: 1.0 / total)  # FSDP averages over ranks
padded_tokens = mistaken(scale=lambda _loop, counts, _index, _total: 1.0 / (6.0 * len(counts)))
last_micro_batch = mistaken(
    is_synchronised=lambda _loop, _step, is_last: True,
    begin=lambda loop, _step, _index: loop.optimizer.zero_grad(),
)
not_zeroed = mistaken(end=lambda _loop: None)
no_final_sync = mistaken(is_synchronised=lambda _loop, _step, is_last: False)
no_sync_after_first_step = mistaken(is_synchronised=lambda _loop, step, is_last: is_last and step == 0)
gradient_reduced_again = mistaken(reduced=reduce_again("up.weight"))
local_norm, norm_of_copies = owner(clip=clip_locally), owner(clip=clip_with_copies)
norms_of_layers, layer_not_clipped = owner(clip=clip_layer_by_layer), owner(clip=clip_without_first_layer)
norm_of_last_layer = owner(clip=clip_by_last_layer)
not_clipped = mistaken(clip=lambda loop: clip_grad_norm_(loop.model.parameters(), float("inf")))
clipped_twice = mistaken(clip=clip_twice)
other_collectives = mistaken(reduced=leave_out_a_collective)
raises = mistaken(begin=raise_in_second_step)


class Odd(Model):
    """A parameter of three rows more, which two ranks hold unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.odd.sum(0) / 3.0)


waits_for_uneven_shard = mistaken(declare(model=Odd)(shard), reduced=reduce_again("odd"))


def remade_by_rank(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Make a layer again, which draws other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    model.up = nn.Linear(WIDTH, 2 * WIDTH)
    return shard(model, mesh, config)


def unsharded_layer(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Leave the last layer out."""
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={*model.down.parameters()})


class HasFrozen(Model):
    """Model whose norm is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


def unfrozen(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Train the norm, which one process freezes."""
    model.norm.requires_grad_(True)
    return shard(model, mesh, config)


DECAY = 0.1


def by_dimensions(parameters: Iterable[nn.Parameter], *, decay: float) -> list[dict[str, Any]]:
    """Return groups of parameters of which matrices alone are decayed."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.ndim > 1].append(parameter)
    return [{"params": groups[True], "weight_decay": decay}, {"params": groups[False], "weight_decay": 0.0}]


def decayed_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(by_dimensions(parameters, decay=DECAY), lr=0.1, momentum=0.9)


def decayed_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(by_dimensions(parameters, decay=DECAY), lr=1e-2)


def with_optimizer(make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Callable[..., tuple[nn.Module, Optimizer]]:
    """Return a function that shards a model and makes another optimizer."""

    def parallelize(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> tuple[nn.Module, Optimizer]:
        sharded = shard(model, mesh, config)
        return sharded, make(sharded.parameters())

    return parallelize


def decoupled_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return an optimizer that multiplies weights, as AdamW does."""
    optimizer = SGD(by_dimensions(parameters, decay=0.0), lr=0.1, momentum=0.9)

    def decay(*_unused: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(1.0 - 0.1 * DECAY)

    optimizer.register_step_pre_hook(decay)
    return optimizer


def add_decay(loop: OwnLoop) -> None:
    """Add weights to gradients before these are clipped, as by a term of the loss."""
    for parameter in loop.model.parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad.add_(parameter.detach(), alpha=DECAY)


class Noisy(Model):
    """Dropout, if it is on."""

    noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(dropout(x, self.noise))


def dropout_in_parallel(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Switch dropout on."""
    model.noise = 0.1
    return shard(model, mesh, config)


decay_missing = owner(optimizer=decayed_sgd, parallelize=with_optimizer(sgd))
decay_everywhere = owner(
    optimizer=decayed_sgd,
    parallelize=with_optimizer(lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=DECAY)),
)
decay_decoupled = owner(optimizer=decayed_sgd, parallelize=with_optimizer(decoupled_sgd))
decay_added = owner(
    optimizer=decayed_adamw,
    parallelize=with_optimizer(lambda parameters: Adam(by_dimensions(parameters, decay=DECAY), lr=1e-2)),
)
decay_in_gradients = mistaken(reduced=add_decay)
layer_remade_by_rank = owner(parallelize=remade_by_rank)
layer_unsharded = owner(parallelize=unsharded_layer, clip=clip_one_by_one)
layer_not_updated = owner(parallelize=frozen_layer)
layer_frozen = owner(parallelize=without_gradient)
layer_unfrozen = owner(parallelize=unfrozen, model=HasFrozen)
random_in_parallel = owner(parallelize=dropout_in_parallel, model=Noisy)
head_untied = owner(parallelize=untied, tied_model=Tied)


class NormalisedSgd(Optimizer):
    """Step whose length is in proportion to each parameter's norm, as LARS and LAMB take it."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, by_shard: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.by_shard = by_shard

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                scale = self._norm(p) / self._norm(p.grad)
                p.add_(p.grad, alpha=-0.1 * scale if 0.0 < scale < float("inf") else -0.1)

    def _norm(self, tensor: Tensor) -> float:
        norm = torch.linalg.vector_norm(tensor)
        return float(norm.to_local() if isinstance(norm, DTensor) and self.by_shard else plain(norm))


def with_norms_of_shards(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> Any:
    sharded = shard(model, mesh, config)
    return sharded, NormalisedSgd(sharded.parameters(), by_shard=True)


optimizer_of_shards = owner(parallelize=with_norms_of_shards, optimizer=NormalisedSgd)
