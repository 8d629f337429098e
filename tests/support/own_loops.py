"""Own loops of the tests: some that are right, each in its own way, and some that are wrong in one thing each."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from conformance.subjects import LoopConfig, own_loop
from tests.support import plain_script
from tests.support.plain_script import Net

Batch = dict[str, Tensor]


def batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(50, (4, 8), generator=generator)
    ignored = torch.rand(4, 8, generator=generator) < 0.4
    return {"tokens": tokens, "labels": tokens.roll(-1, dims=1).masked_fill(ignored, -100)}


def batch_with_notes(generator: torch.Generator) -> Batch:
    """Return a batch with a tensor that is larger than the model's outputs, and that no loss reads."""
    return batch(generator) | {"notes": torch.zeros(4, 4096)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def pair(generator: torch.Generator) -> list[Tensor]:
    return [torch.randint(50, (4, 8), generator=generator) for _ in range(2)]


def loss_of_pair(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3, weight_decay=0.1)


def scripted(*, with_limit: bool = True, **options: Any) -> Any:
    """Return the loop of a script, with the limit that the suite gives for clipping or without it."""

    @own_loop(model=Net, batch=pair, loss=loss_of_pair, optimizer=adamw, **options)
    def train(config: LoopConfig) -> list[float]:
        limit = {"max_norm": config.max_norm} if with_limit else {}
        return plain_script.main(accumulation=config.accumulation, **limit)

    return train


script, script_that_steps_elsewhere = scripted(accumulation="even"), scripted()
script_with_a_limit_of_its_own = scripted(accumulation="even", with_limit=False)


def sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def total(number: float | Tensor) -> Tensor:
    summed = torch.as_tensor(number, dtype=torch.float32).clone()
    dist.all_reduce(summed)
    return summed


class Trainer:
    """Trainer that is right; each method is a place for a mistake."""

    def __init__(self, config: LoopConfig) -> None:
        self.max_norm = config.max_norm
        self.model: Any = self.shard(config.model())
        self.optimizer: Optimizer = sgd(self.model.parameters())

    def shard(self, model: Any) -> Any:
        return sharded(model)

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        count = self.count(micro_batches)
        logged = torch.zeros((), device=count.device)
        for index, each in enumerate(micro_batches):
            self.sync(index == len(micro_batches) - 1)
            loss_sum = self.loss(each)
            self.backward(loss_sum * (dist.get_world_size() / count))
            logged += loss_sum.detach()
        self.clip()
        self.update()
        return total(logged) / count

    def count(self, micro_batches: Sequence[Batch]) -> Tensor:
        return total(sum(float((each["labels"] != -100).sum()) for each in micro_batches))

    def sync(self, is_last: bool) -> None:
        self.model.set_requires_gradient_sync(is_last)

    def loss(self, batch: Batch) -> Tensor:
        return loss(self.model, batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self) -> None:
        clip_grad_norm_(self.model.parameters(), self.max_norm)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        return [p.grad.to_local() for p in self.model.parameters() if isinstance(p.grad, DTensor)]

    def scale_down(self, norm: Tensor) -> None:
        torch._foreach_mul_(self.gradients(), float((self.max_norm / (norm + 1e-6)).clamp(max=1.0)))


def loop(trainer: Callable[[LoopConfig], Any], **options: Any) -> Any:
    @own_loop(**{"model": Net, "batch": batch, "loss": loss, **options})
    def train(config: LoopConfig) -> Iterator[Any]:
        made = trainer(config)
        for micro_batches in config.steps:
            yield made.train_step(micro_batches)

    return train


def altered(trainer: type[Trainer] = Trainer, **methods: Any) -> type[Trainer]:
    """Return a trainer with other methods."""
    return type("Altered", (trainer,), methods)


class OtherModel(Trainer):
    """Trainer of another model, made on the meta device, into which it loads the given weights."""

    def __init__(self, config: LoopConfig) -> None:
        self.max_norm = config.max_norm
        weights = config.model().state_dict()
        with torch.device("meta"):
            self.model = sharded(Net())
        self.model.to_empty(device=config.device)
        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True))
        self.optimizer = sgd(self.model.parameters())


def clip_by_all_shards(trainer: Trainer) -> None:
    squares = torch.stack([gradient.norm() ** 2 for gradient in trainer.gradients()]).sum()
    trainer.scale_down(total(squares).sqrt())


class Averages(Trainer):
    """Trainer with two moving averages, whose clipping adds nothing to the norm."""

    clip = clip_by_all_shards

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.averages = {share: [p.detach().clone() for p in self.model.parameters()] for share in (0.5, 0.1)}

    def scale_down(self, norm: Tensor) -> None:
        torch._foreach_mul_(self.gradients(), float((self.max_norm / norm).clamp(max=1.0)))

    @torch.no_grad()
    def update(self) -> None:
        super().update()
        for share, average in self.averages.items():
            for kept, parameter in zip(average, self.model.parameters(), strict=True):
                kept.lerp_(parameter, share)


class Unclipped(Trainer):
    """Trainer that divides gradients after backward, and does not clip them."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * 2)

    def clip(self) -> None:
        torch._foreach_mul_(self.gradients(), 0.5)


class GatheredAhead(Trainer):
    """Trainer that gathers all groups before each step, without waiting."""

    def train_step(self, micro_batches: Sequence[Batch]) -> Any:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
        return super().train_step(micro_batches)


class UnderAutocast(Trainer):
    """Trainer that leaves precision to autocast, and casts no parameter."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.is_on = config.precision == "bf16"

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_on):
            return super().loss(batch)


class Taught(Trainer):
    """Trainer with a frozen teacher, which is sharded on its own."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.teacher: Any = sharded(taught_net()).requires_grad_(False)

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(batch["tokens"])
        return distance(self.model(batch["tokens"]), taught, batch)


def taught_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def distance(logits: Tensor, taught: Tensor, batch: Batch) -> Tensor:
    losses = (logits.log_softmax(-1) * -taught.softmax(-1)).sum(-1)
    return losses.masked_fill(batch["labels"] == -100, 0.0).sum()


def taught_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        taught = taught_net().to(next(model.parameters()).dtype)(batch["tokens"])
    return distance(model(batch["tokens"]), taught, batch)


def clip_by_own_shards(trainer: Trainer) -> None:
    trainer.scale_down(torch.stack([gradient.norm() for gradient in trainer.gradients()]).norm())


class OptimizerFirst(Trainer):
    def __init__(self, config: LoopConfig) -> None:
        self.max_norm = config.max_norm
        self.model = config.model()
        self.optimizer = sgd(self.model.parameters())
        sharded(self.model)


class Scheduled(Trainer):
    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.schedule = StepLR(self.optimizer, 1, gamma=0.5)

    def update(self) -> None:
        super().update()
        self.schedule.step()


class OptimizerRemade(Scheduled):
    """Trainer that makes its optimizer again, whose learning rate the schedule of the first one leaves alone."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.optimizer = sgd(self.model.parameters())


class ScheduledAfterRemaking(OptimizerRemade):
    """Trainer that makes its optimizer again, and then its schedule."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.schedule = StepLR(self.optimizer, 1, gamma=0.5)


class Scaled(Trainer):
    """Trainer with a loss scale, and without clipping by torch: gradients are those that the scaler leaves."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss: Tensor) -> None:
        super().backward(self.scaler.scale(loss))

    def clip(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_by_all_shards(self)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class ScheduledByMicroBatch(Scheduled):
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.schedule.step()

    def update(self) -> None:
        Trainer.update(self)


class Closure(Trainer):
    def train_step(self, micro_batches: Sequence[Batch]) -> None:
        count = self.count(micro_batches)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            for each in micro_batches:
                self.backward(self.loss(each) * (dist.get_world_size() / count))
            self.clip()
            return count

        self.optimizer.step(closure)  # type: ignore[arg-type]


class Recomputed(Trainer):
    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        for block in self.model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class OneBackward(Trainer):
    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        summed = sum((self.loss(each) for each in micro_batches), torch.zeros(()))
        count = self.count(micro_batches)
        self.backward(summed * (dist.get_world_size() / count))
        norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.update()
        return total(summed.detach()) / count, norm


class DividedAfterwards(Trainer):
    """Trainer that divides gradients after backward, before torch clips them."""

    def train_step(self, micro_batches: Sequence[Batch]) -> None:
        for each in micro_batches:
            self.backward(self.loss(each))
        torch._foreach_mul_(self.gradients(), float(dist.get_world_size() / self.count(micro_batches)))
        self.clip()
        self.update()


class Adversarial(Trainer):
    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.other = nn.Linear(50, 1)
        fully_shard(self.other)
        self.other_optimizer = sgd(self.other.parameters())

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch["tokens"])
        return logits.sum() + self.other(logits.detach()).sum()  # type: ignore[no-any-return]

    def update(self) -> None:
        self.other_optimizer.step()


class TwoOptimizers(Trainer):
    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.others = [sgd(self.model.head.parameters())]


def loss_of_two_calls(trainer: Trainer, batch: Batch) -> Tensor:
    halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(2), slice(2, None))]
    return loss(trainer.model, halves[0]) + loss(trainer.model, halves[1])


@torch.no_grad()
def update_and_halve_head(trainer: Trainer) -> None:
    Trainer.update(trainer)
    trainer.model.head.weight.mul_(0.5)


def trainer_that_steps_in_backward(config: LoopConfig) -> Trainer:
    made = Trainer(config)
    parameter = next(made.model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda _parameter: made.optimizer.step())
    return made


def muon_and_adamw(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        by_kind[parameter.ndim == 2].append(parameter)
    return [Muon(by_kind[True], lr=0.02), AdamW(by_kind[False], lr=1e-3)]


class MatricesApart(Trainer):
    """Trainer with one optimizer for matrices and another one for the rest, which step one after the other."""

    def __init__(self, config: LoopConfig) -> None:
        self.max_norm = config.max_norm
        self.model = sharded(config.model())
        self.optimizers = muon_and_adamw(self.model.parameters())

    def update(self) -> None:
        for each in self.optimizers:
            each.step()
        self.model.zero_grad()


class OwnGroups(Trainer):
    """Trainer that can be made once in a process."""

    is_made = False

    def __init__(self, config: LoopConfig) -> None:
        if OwnGroups.is_made:
            raise RuntimeError("parallel state is initialised already")
        OwnGroups.is_made = True
        super().__init__(config)


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def count_own_labels_twice(_trainer: Trainer, micro_batches: Sequence[Batch]) -> Tensor:
    return torch.tensor(2.0 * sum(float((each["labels"] != -100).sum()) for each in micro_batches))


def step_matrices_alone(trainer: MatricesApart) -> None:
    """Step the optimizer of matrices twice, and the other one never."""
    trainer.optimizers[0].step()
    trainer.model.zero_grad()


@own_loop(
    model=Net,
    batch=batch,
    loss=loss,
    optimizer=sgd,
    scheduler=halving,
    resumes=True,
)
def resumed_schedule(config: LoopConfig) -> Iterator[Any]:
    """Train with a schedule that is saved and loaded with model and optimizer."""
    made = Scheduled(config)
    named = {"model": made.model, "optimizer": made.optimizer, "schedule": made.schedule}
    if config.load_from:
        for name, state in torch.load(config.load_from / f"{dist.get_rank()}", weights_only=False).items():
            named[name].load_state_dict(state)
    for micro_batches in config.steps:
        yield made.train_step(micro_batches)
    if config.save_to:
        torch.save({name: each.state_dict() for name, each in named.items()}, config.save_to / f"{dist.get_rank()}")


@own_loop(model=Net, batch=batch, loss=loss)
def averaged_at_the_end(config: LoopConfig) -> Iterator[Any]:
    """Train, tell losses on the last rank alone, and leave a moving average of the weights in the model."""
    made = Averages(config)
    for micro_batches in config.steps:
        logged = made.train_step(micro_batches)
        yield logged if dist.get_rank() == dist.get_world_size() - 1 else None
    with torch.no_grad():
        for average, parameter in zip(made.averages[0.5], made.model.parameters(), strict=True):
            parameter.copy_(average)


@own_loop(model=Net, batch=batch_with_notes, loss=loss)
def split_by_size(config: LoopConfig) -> Iterator[Any]:
    """Train on the batch of each step in micro-batches of four samples."""
    made = Trainer(config)
    for joined in config.joined_steps:
        parts = zip(*(tensor.split(4) for tensor in joined.values()), strict=True)
        yield made.train_step([dict(zip(joined, part, strict=True)) for part in parts])


right, own_clip, sync_always = (
    loop(Trainer),
    loop(altered(clip=clip_by_all_shards)),
    loop(altered(sync=lambda _trainer, _is_last: None)),
)
other_model, unclipped = loop(OtherModel), loop(Unclipped, max_norm=math.inf)
under_autocast = loop(UnderAutocast, precisions=["fp32", "bf16"])
gathered_ahead, taught = loop(GatheredAhead), loop(Taught, loss=taught_loss)
closure, recomputed, two_calls = loop(Closure), loop(Recomputed), loop(altered(loss=loss_of_two_calls))
scaled, one_backward, divided_afterwards = loop(Scaled), loop(OneBackward), loop(DividedAfterwards)
scheduled = loop(Scheduled, optimizer=sgd, scheduler=halving)
optimizer_remade = loop(OptimizerRemade, optimizer=sgd, scheduler=halving)
scheduled_after_remaking = loop(ScheduledAfterRemaking, optimizer=sgd, scheduler=halving)
scheduled_by_micro_batch = loop(ScheduledByMicroBatch, optimizer=sgd, scheduler=halving)
clipped_while_scaled = loop(altered(Scaled, clip=Trainer.clip))
changed_between_steps = loop(altered(update=update_and_halve_head))
local_clip = loop(altered(clip=clip_by_own_shards))
sync_never = loop(altered(sync=lambda trainer, _is_last: trainer.model.set_requires_gradient_sync(False)))
gradients_kept = loop(altered(update=lambda trainer: trainer.optimizer.step()))
own_count = loop(altered(count=count_own_labels_twice))
optimizer_first, schedule_forgotten = loop(OptimizerFirst), loop(Scheduled)
steps_in_backward, adversarial = loop(trainer_that_steps_in_backward), loop(Adversarial)
two_optimizers, matrices_apart = loop(TwoOptimizers), loop(MatricesApart, optimizer=muon_and_adamw)
one_of_two = loop(altered(MatricesApart, update=step_matrices_alone), optimizer=muon_and_adamw)
never_called = loop(altered(loss=lambda trainer, _batch: trainer.model.head.weight.full_tensor().sum()))
other_optimizer = loop(Trainer, optimizer=adamw)
own_groups, own_groups_declared = loop(OwnGroups), loop(OwnGroups, processes="fresh")
