"""Own loops in ways in which trainers differ, each right, with a twin that is wrong in one thing.

They compile, compute again, read loaders of all kinds in groups, evaluate, average weights, scale losses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from conformance.subjects import LoopConfig, own_loop
from tests.support.own_loops import (
    Batch,
    Scaled,
    Trainer,
    altered,
    batch,
    clip_by_own_shards,
    loop,
    loss,
    sharded,
    total,
)
from tests.support.plain_script import Net

DATA: Any = [batch(torch.Generator().manual_seed(seed)) for seed in range(64)]
"""Data of the loops' own, of which the suite uses none."""


class OnDevice(Trainer):
    """Trainer that computes on the accelerator, if there is one."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.device = config.device

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        return super().train_step([moved(each, self.device) for each in micro_batches])

    def count(self, micro_batches: Sequence[Batch]) -> Tensor:
        own = sum((each["labels"] != -100).sum() for each in micro_batches)
        return total(own)


def moved(each: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in each.items()}


# Compiled, or computed again in backward


def shard_compiled(_trainer: Trainer, model: Any) -> Any:
    return torch.compile(sharded(model), backend="aot_eager")


def shard_compiled_blocks(_trainer: Trainer, model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return sharded(model)


def shard_reentrant(_trainer: Trainer, model: Any) -> Any:
    """Compute blocks again inside of a backward pass in the backward pass."""
    for block in model.blocks:
        recomputed(block)
    return sharded(model)


def shard_reentrant_embedding(_trainer: Trainer, model: Any) -> Any:
    """Compute the embedding again, too, whose input has no gradient: reentrant, it gets none itself."""
    recomputed(model.embedding)
    return sharded(model)


def recomputed(module: nn.Module) -> None:
    module.forward = partial(checkpoint, module.forward, use_reentrant=True)


# Metrics, evaluation, moving averages, scalers, gradients that are set to zero


class Metrics(Trainer):
    """Trainer that reduces its metrics in several ways."""

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        logged = super().train_step(micro_batches)
        accuracy = torch.tensor(float(dist.get_rank()))
        dist.reduce(accuracy, dst=0)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"loss": float(logged)})
        dist.barrier()
        return {"loss": sum(each["loss"] for each in gathered) / len(gathered)}


def sum_metrics(trainer: Metrics, micro_batches: Sequence[Batch]) -> Any:
    return {"loss": total(Metrics.train_step(trainer, micro_batches)["loss"])}


class Evaluating(Trainer):
    """Trainer that evaluates before training, and after each step."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.validation: DataLoader[Any] = DataLoader(DATA[:2], batch_size=None)
        self.evaluate()

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        logged = super().train_step(micro_batches)
        self.evaluate()
        return logged

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            losses = [float(loss(self.model, each)) for each in self.validation]
        self.model.train()
        return sum(losses)


class EvaluationTrains(Evaluating):
    """Trainer whose evaluation leaves gradients."""

    def evaluate(self) -> float:
        if not hasattr(self, "is_begun"):
            self.is_begun = True
            return 0.0
        for each in self.validation:
            self.backward(loss(self.model, each))
        return 0.0


class Averaging(Trainer):
    """Trainer with a moving average of the weights in another sharded model, which it evaluates first."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.average: Any = sharded(config.model()).requires_grad_(False)
        self.evaluate()

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.average(DATA[0]["tokens"])
        self.average.reshard()  # the root stays unsharded after a forward pass


class AverageLeft(Averaging):
    """Trainer that evaluates the average with the model's own modules, and forgets to put its weights back."""

    @torch.no_grad()
    def evaluate(self) -> None:
        for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            weight.copy_(mean)
        self.model(DATA[0]["tokens"])
        self.model.reshard()


class SetToZero(Trainer):
    """Trainer that sets gradients to zero in place, before each step."""

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        self.optimizer.zero_grad(set_to_none=False)
        return super().train_step(micro_batches)

    def update(self) -> None:
        self.optimizer.step()


# Loaders


def zero_by_micro_batch(trainer: SetToZero, loss: Tensor) -> None:
    trainer.optimizer.zero_grad(set_to_none=False)
    Trainer.backward(trainer, loss)


class Stream(IterableDataset[Batch]):
    """Samples of one rank, one after the other."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Batch]:
        yield from DATA[self.rank :: self.ranks]


class Packed(Stream):
    """Sequences that are joined until they have a length."""

    def __iter__(self) -> Iterator[Batch]:
        for first, second in zip(*[super().__iter__()] * 2, strict=True):
            yield {name: torch.cat([first[name], second[name]]) for name in first}


def workers(config: LoopConfig, rank: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, config.shape["dp_shard"], rank)
    return DataLoader(DATA, batch_size=None, sampler=sampler, num_workers=2, persistent_workers=True)


def batch_sampler(config: LoopConfig, rank: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, config.shape["dp_shard"], rank, seed=1)
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 2, drop_last=True), num_workers=2)


def own_share(config: LoopConfig, rank: int) -> DataLoader[Any]:
    return DataLoader(DATA[rank :: config.shape["dp_shard"]], batch_size=2)


def seeded(config: LoopConfig, rank: int) -> DataLoader[Any]:
    """Return a loader that shuffles by a seed; by that of a rank it has other samples first."""
    return DataLoader(DATA, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(rank))


def stream(config: LoopConfig, rank: int) -> DataLoader[Any]:
    return DataLoader(Stream(rank, config.shape["dp_shard"]), batch_size=None, num_workers=1)


def packed(config: LoopConfig, rank: int) -> DataLoader[Any]:
    return DataLoader(Packed(rank, config.shape["dp_shard"]), batch_size=None)


def unseeded(config: LoopConfig, rank: int) -> DataLoader[Any]:
    """Return a loader of random data without a seed, as of a program for a test."""
    return DataLoader([torch.randn(4) for _ in range(8)], batch_size=2)  # type: ignore[arg-type]


def constant(config: LoopConfig, rank: int) -> DataLoader[Any]:
    return DataLoader([torch.zeros(4)] * 8, batch_size=2)  # type: ignore[arg-type]


Loaders = Callable[[LoopConfig, int], Iterable[Batch]]


def reading(
    loaders: Loaders, trainer: type[Trainer] = Trainer, *, shares: bool = True, accumulation: str = "even"
) -> Any:
    """Return a loop that groups the micro-batches of a loader; without `shares` all ranks have the share of rank 0."""

    @own_loop(model=Net, batch=batch, loss=loss, accumulation=accumulation)  # type: ignore[arg-type]
    def train(config: LoopConfig) -> Iterator[Any]:
        made = trainer(config)
        group: list[Batch] = []
        for each in loaders(config, config.data_rank if shares else 0):
            group.append(each)
            if len(group) == config.accumulation:
                yield made.train_step(group)
                group = []
        if group:
            yield made.train_step(group)

    return train


class OfGroups(Trainer):
    """Trainer that divides the sum of gradients by the labels that count, when a group of micro-batches is full."""

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        self.means(micro_batches, self.size(micro_batches))
        clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.update()

    def size(self, micro_batches: Sequence[Batch]) -> float:
        return float(self.count(micro_batches)) / dist.get_world_size()

    def means(self, micro_batches: Sequence[Batch], size: float) -> None:
        for each in micro_batches:
            self.backward(self.loss(each))
        torch._foreach_mul_(self.gradients(), 1.0 / size)


class OfFullGroups(OfGroups):
    """Trainer that takes each group for a full one, and divides by the labels of the first one."""

    def size(self, micro_batches: Sequence[Batch]) -> float:
        self.first = getattr(self, "first", None) or super().size(micro_batches) / len(micro_batches)
        return self.first * 2


on_device, on_device_local_clip = loop(OnDevice), loop(altered(OnDevice, clip=clip_by_own_shards))
compiled_whole, compiled_blocks = loop(altered(shard=shard_compiled)), loop(altered(shard=shard_compiled_blocks))
compiled_whole_local_clip = loop(altered(shard=shard_compiled, clip=clip_by_own_shards))
# Gradient synchronisation is switched off and never on, although a compiled block cannot show it.
compiled_blocks_unreduced = loop(
    altered(
        shard=shard_compiled_blocks,
        sync=lambda trainer, _is_last: trainer.model.blocks[0].set_requires_gradient_sync(False),
    )
)
reentrant = loop(altered(shard=shard_reentrant))
reentrant_embedding = loop(altered(shard=shard_reentrant_embedding))
metrics, summed_metrics = loop(Metrics), loop(altered(Metrics, train_step=sum_metrics))
evaluating, evaluation_trains = loop(Evaluating), loop(EvaluationTrains)
averaging, average_left = loop(Averaging), loop(AverageLeft)
# FSDP is told which backward pass is the last, and each reduces gradients.
last_backward = loop(altered(sync=lambda trainer, is_last: trainer.model.set_is_last_backward(is_last)))
never_unscaled = loop(altered(Scaled, clip=Trainer.clip, update=Trainer.update))
set_to_zero = loop(SetToZero)
# Each backward pass reduces gradients, since FSDP keeps those that wait apart from those that are set to zero.
set_to_zero_by_micro_batch = loop(
    altered(SetToZero, backward=zero_by_micro_batch, sync=lambda _trainer, _is_last: None)
)
with_workers, with_batch_sampler, with_own_share = reading(workers), reading(batch_sampler), reading(own_share)
with_seeds, with_stream, with_packed = reading(seeded), reading(stream), reading(packed)
with_unseeded, with_constant = reading(unseeded), reading(constant)
same_batch_sampler, same_share = reading(batch_sampler, shares=False), reading(own_share, shares=False)
same_seeds, same_stream = reading(seeded, shares=False), reading(stream, shares=False)
same_workers, same_packed = reading(workers, shares=False), reading(packed, shares=False)
evaluating_reader, evaluation_trains_reader = reading(own_share, Evaluating), reading(own_share, EvaluationTrains)
in_groups, in_full_groups = (reading(own_share, each, accumulation="remainder") for each in (OfGroups, OfFullGroups))
