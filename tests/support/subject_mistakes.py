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
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from conformance.subjects import ParallelConfig
from conformance.subjects.decorated import FunctionSubject, sgd
from conformance.subjects.loop import Loop, plain
from conformance.subjects.protocol import Batch, StepObserver
from tests.support.subject_models import WIDTH, Model, Tied, changed, clip_locally, declare, loss, shard


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


def owner(loop: type[OwnLoop], *, parallelize: Callable[..., Any] = shard, **options: Any) -> FunctionSubject:
    """Return the subject of a loop; on two ranks, and on four with copies."""
    return changed(declare(meshes=["dp2", "hsdp2x2"], **options)(parallelize), loop)


right = owner(OwnLoop)


class LocalTokens(OwnLoop):
    """Each rank divides by its own tokens."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return 1.0 / sum(counts)


class MicroBatchMeans(OwnLoop):
    """Each micro-batch is divided by its own tokens, and by their number."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return 1.0 / counts[index] / len(counts)


class NotDividedByMicroBatches(OwnLoop):
    """Each micro-batch is divided by its own tokens, and not by their number."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return 1.0 / counts[index]


class SumOfRanks(OwnLoop):
    """The loss is multiplied by the ranks once too often."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return self.data.ranks**2 / total


class DividedTwice(OwnLoop):
    """The loss is divided by the ranks, whose gradients FSDP averages."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return 1.0 / total


class PaddedTokens(OwnLoop):
    """Ignored labels count."""

    def scale(self, counts: Sequence[float], index: int, total: float) -> float:
        return 1.0 / (6.0 * len(counts))


class LastMicroBatch(OwnLoop):
    """Gradients are set to zero before each micro-batch."""

    def is_synchronised(self, step: int, *, is_last: bool) -> bool:
        return True

    def begin(self, step: int, index: int) -> None:
        self.optimizer.zero_grad()


class NotZeroed(OwnLoop):
    """Gradients of the step before are left."""

    def end(self) -> None:
        """Forget to set gradients to zero."""


class NoFinalSync(OwnLoop):
    """Gradients are never reduced."""

    def is_synchronised(self, step: int, *, is_last: bool) -> bool:
        return False


class NoSyncAfterFirstStep(OwnLoop):
    """Gradients are reduced in the first step alone."""

    def is_synchronised(self, step: int, *, is_last: bool) -> bool:
        return is_last and step == 0


class GradientReducedAgain(OwnLoop):
    """A gradient that FSDP has reduced is reduced once more."""

    def reduced(self) -> None:
        gradient = self.model.get_parameter("up.weight").grad
        assert gradient is not None
        dist.all_reduce(local(gradient))


class NotClipped(OwnLoop):
    """The norm is computed, and nothing is scaled."""

    def clip(self) -> Tensor:
        return clip_grad_norm_(self.model.parameters(), float("inf"))


class ClippedTwice(OwnLoop):
    """Gradients are scaled by the factor a second time."""

    def clip(self) -> Tensor:
        norm = plain(super().clip())
        after = plain(clip_grad_norm_(self.model.parameters(), float("inf")))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(float(after / norm))
        return norm


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


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class WaitsForUnevenShard(OwnLoop):
    """An all-reduce of a shard whose size depends on the rank."""

    def reduced(self) -> None:
        gradient = self.model.get_parameter("odd").grad
        assert gradient is not None
        dist.all_reduce(local(gradient))


class OtherCollectives(OwnLoop):
    """Rank 1 leaves out the first of two collectives."""

    def reduced(self) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(64))
        dist.barrier()


class Raises(OwnLoop):
    """The second step raises on all ranks."""

    def begin(self, step: int, index: int) -> None:
        if step == 1:
            self._prepare({})

    def _prepare(self, options: dict[str, int]) -> int:
        return options["warmup"]


local_tokens, micro_batch_means = owner(LocalTokens), owner(MicroBatchMeans)
not_divided_by_micro_batches, sum_of_ranks = owner(NotDividedByMicroBatches), owner(SumOfRanks)
divided_twice, padded_tokens, last_micro_batch = owner(DividedTwice), owner(PaddedTokens), owner(LastMicroBatch)
not_zeroed, no_final_sync = owner(NotZeroed), owner(NoFinalSync)
no_sync_after_first_step, gradient_reduced_again = owner(NoSyncAfterFirstStep), owner(GradientReducedAgain)
local_norm, norm_of_copies = owner(OwnLoop, clip=clip_locally), owner(OwnLoop, clip=clip_with_copies)
not_clipped, clipped_twice = owner(NotClipped), owner(ClippedTwice)
other_collectives, raises = owner(OtherCollectives), owner(Raises)


class Odd(Model):
    """A parameter of three rows more, which two ranks hold unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.odd.sum(0) / 3.0)


waits_for_uneven_shard = owner(WaitsForUnevenShard, model=Odd)


def remade_by_rank(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Make a layer again, which draws other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    model.up = nn.Linear(WIDTH, 2 * WIDTH)
    return shard(model, mesh, config)


def unsharded_layer(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Leave the last layer out."""
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={*model.down.parameters()})


def frozen(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Freeze a layer."""
    model.up.requires_grad_(False)
    return shard(model, mesh, config)


class HasFrozen(Model):
    """Model whose norm is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


def unfrozen(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Train the norm, which one process freezes."""
    model.norm.requires_grad_(True)
    return shard(model, mesh, config)


def not_all_in_optimizer(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> tuple[nn.Module, Optimizer]:
    """Leave the norm out of the optimizer."""
    sharded = shard(model, mesh, config)
    return sharded, sgd([each for name, each in sharded.named_parameters() if not name.startswith("norm")])


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


class DecayInGradients(OwnLoop):
    """Weights are added to gradients before these are clipped, as by a term of the loss."""

    def reduced(self) -> None:
        for parameter in self.model.parameters():
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


def untied_head(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Untie a layer."""
    if isinstance(model, Tied):
        model.again.weight = nn.Parameter(model.up.weight.detach().clone())
    return shard(model, mesh, config)


decay_missing = owner(OwnLoop, optimizer=decayed_sgd, parallelize=with_optimizer(sgd))
decay_everywhere = owner(
    OwnLoop,
    optimizer=decayed_sgd,
    parallelize=with_optimizer(lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=DECAY)),
)
decay_decoupled = owner(OwnLoop, optimizer=decayed_sgd, parallelize=with_optimizer(decoupled_sgd))
decay_added = owner(
    OwnLoop,
    optimizer=decayed_adamw,
    parallelize=with_optimizer(lambda parameters: Adam(by_dimensions(parameters, decay=DECAY), lr=1e-2)),
)
decay_in_gradients = owner(DecayInGradients)
layer_remade_by_rank = owner(OwnLoop, parallelize=remade_by_rank)
layer_unsharded = owner(OwnLoop, parallelize=unsharded_layer, clip=clip_one_by_one)
layer_not_updated = owner(OwnLoop, parallelize=not_all_in_optimizer)
layer_frozen = owner(OwnLoop, parallelize=frozen)
layer_unfrozen = owner(OwnLoop, parallelize=unfrozen, model=HasFrozen)
random_in_parallel = owner(OwnLoop, parallelize=dropout_in_parallel, model=Noisy)
head_untied = owner(OwnLoop, parallelize=untied_head, tied_model=Tied)


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


full_tensor_optimizer = owner(OwnLoop, optimizer=NormalisedSgd)


def with_norms_of_shards(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> Any:
    sharded = shard(model, mesh, config)
    return sharded, NormalisedSgd(sharded.parameters(), by_shard=True)


optimizer_of_shards = owner(OwnLoop, parallelize=with_norms_of_shards, optimizer=NormalisedSgd)
