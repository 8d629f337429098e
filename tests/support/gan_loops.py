"""Own loops that train two networks in turns: one that is right, and twins that are wrong in one thing each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import softplus
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop
from tests.support.own_loops import sgd, total

WIDTH, LATENT = 16, 8
Batch = dict[str, Tensor]


class Gan(nn.Module):
    """Two networks, whose container is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(generator: torch.Generator) -> Batch:
    noise = [torch.randn(6, size, generator=generator) for size in (WIDTH, LATENT)]
    return {"real": noise[0] + 1.0, "latent": noise[1]}


def loss_of_discriminator(gan: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        fake = gan.generator(batch["latent"])
    return softplus(-gan.discriminator(batch["real"])).sum() + softplus(gan.discriminator(fake)).sum()


def loss_of_generator(gan: Any, batch: Batch) -> Tensor:
    return softplus(-gan.discriminator(gan.generator(batch["latent"]))).sum()


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


class Trainer:
    """Trainer that is right; each method is a place for a mistake."""

    def __init__(self, config: LoopConfig) -> None:
        self.max_norm = config.max_norm
        self.gan: Any = config.model()
        networks: list[Any] = [self.gan.generator, self.gan.discriminator]
        for network in networks:
            for layer in (network[0], network[2]):
                fully_shard(layer)
            fully_shard(network)
        self.optimizers = {"discriminator": sgd(self.discriminator()), "generator": adamw(self.generator())}

    def discriminator(self) -> list[nn.Parameter]:
        return list(self.gan.discriminator.parameters())

    def generator(self) -> list[nn.Parameter]:
        return list(self.gan.generator.parameters())

    def train_step(self, micro_batches: Sequence[Batch]) -> Iterator[Tensor]:
        yield self.turn("discriminator", self.loss_of_discriminator, micro_batches)
        yield self.turn("generator", loss_of_generator, micro_batches)

    def turn(self, network: str, loss: Callable[[Any, Batch], Tensor], micro_batches: Sequence[Batch]) -> Tensor:
        count, logged = total(sum(len(each["real"]) for each in micro_batches)), torch.zeros(())
        self.forget(network)
        for each in micro_batches:
            loss_sum = loss(self.gan, each)
            self.backward(network, loss_sum * (2 / count))
            logged += loss_sum.detach()
        clip_grad_norm_(getattr(self, network)(), self.max_norm)
        self.optimizers[network].step()
        return total(logged) / count

    def loss_of_discriminator(self, gan: Any, batch: Batch) -> Tensor:
        return loss_of_discriminator(gan, batch)

    def forget(self, network: str) -> None:
        self.optimizers[network].zero_grad()

    def backward(self, network: str, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class NothingForgotten(Trainer):
    """Trainer in which gradients that the generator's turn gives the discriminator leak into its next step."""

    def forget(self, network: str) -> None:
        if network == "generator":
            super().forget(network)


class NotDetached(Trainer):
    """Trainer in which the discriminator's loss reaches the generator, whose gradients are forgotten too early."""

    def loss_of_discriminator(self, gan: Any, batch: Batch) -> Tensor:
        fake = gan.discriminator(gan.generator(batch["latent"]))
        return softplus(-gan.discriminator(batch["real"])).sum() + softplus(fake).sum()

    def forget(self, network: str) -> None:
        if network == "discriminator":
            for each in self.optimizers.values():
                each.zero_grad()


class NotReduced(Trainer):
    """Trainer that never reduces the gradients of the discriminator."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.gan.discriminator.set_requires_gradient_sync(False)


class GeneratorFirst(Trainer):
    def train_step(self, micro_batches: Sequence[Batch]) -> Iterator[Tensor]:
        yield self.turn("generator", loss_of_generator, micro_batches)
        yield self.turn("discriminator", self.loss_of_discriminator, micro_batches)


def loop(trainer: type[Trainer]) -> Any:
    @own_loop(
        model=Gan,
        batch=batch,
        loss={"discriminator": loss_of_discriminator, "generator": loss_of_generator},
        optimizer={"discriminator": sgd, "generator": adamw},
    )
    def train(config: LoopConfig) -> Iterator[Any]:
        made = trainer(config)
        for micro_batches in config.steps:
            yield from made.train_step(micro_batches)

    return train


right, nothing_forgotten, not_detached = loop(Trainer), loop(NothingForgotten), loop(NotDetached)
not_reduced, generator_first = loop(NotReduced), loop(GeneratorFirst)
