"""Adversarial pair (GAN) whose optimizers take turns: the trainer before which faults of turns are tried."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import softplus
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop
from conformance.subjects.data import to_device

_WIDTH, _HIDDEN, _LATENT, _SAMPLES = 16, 32, 8, 6
Batch = dict[str, Tensor]
"""Real samples, and latent vectors of as many that the generator makes."""


class Gan(nn.Module):
    """Generator and discriminator; the module that holds both is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(_LATENT, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(_WIDTH, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))


def batch(generator: torch.Generator) -> Batch:
    """Return a micro-batch in fp32."""
    real, latent = (torch.randn(_SAMPLES, size, generator=generator) for size in (_WIDTH, _LATENT))
    return {"real": real + 1.0, "latent": latent}


def loss_of_discriminator(gan: Any, batch: Batch) -> Tensor:
    """Return the summed loss of the discriminator's turn, for which made samples are data."""
    with torch.no_grad():
        made = gan.generator(batch["latent"])
    return softplus(-gan.discriminator(batch["real"])).sum() + softplus(gan.discriminator(made)).sum()


def loss_of_generator(gan: Any, batch: Batch) -> Tensor:
    """Return the summed loss of the generator's turn."""
    return softplus(-gan.discriminator(gan.generator(batch["latent"]))).sum()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of the discriminator."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of the generator."""
    return AdamW(parameters, lr=1e-3)


DECLARED: Any = {
    "model": Gan,
    "batch": batch,
    "loss": {"discriminator": loss_of_discriminator, "generator": loss_of_generator},
    "optimizer": {"discriminator": sgd, "generator": adamw},
    "meshes": ["dp2", "hsdp2x2", "dp2-tp2"],
    "precisions": ["fp32", "bf16"],
}
"""Arguments of `own_loop` for this pair."""


class Trainer:
    """Trainer of both networks, on all meshes; a subclass may do one thing in another way."""

    def __init__(self, config: LoopConfig) -> None:
        self.config, self.mesh = config, config.device_mesh()
        self.copies = config.shape.get("tp", 1)
        """Ranks that see the same data."""
        self.gan = config.model()
        self.networks: dict[str, Any] = dict(self.gan.named_children())
        for network in self.networks.values():
            self.shard(network)
        make = {"discriminator": sgd, "generator": adamw}
        self.optimizers = {name: make[name](network.parameters()) for name, network in self.networks.items()}

    def shard(self, network: Any) -> None:
        """Make a network parallel."""
        if self.copies > 1:
            parallelize_module(network, self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = self.mesh[tuple(name for name in self.config.shape if name != "tp")]
        for module in (network[0], network[2], network):
            fully_shard(module, mesh=mesh, mp_policy=self.config.mixed_precision)

    def train_step(self, micro_batches: Sequence[Batch]) -> Iterator[Tensor]:
        """Take the turns of a training step, and yield the loss of each."""
        yield self.turn("discriminator", self.loss_of_discriminator, micro_batches)
        yield self.turn("generator", loss_of_generator, micro_batches)

    def turn(self, network: str, loss: Callable[[Any, Batch], Tensor], micro_batches: Sequence[Batch]) -> Tensor:
        """Train one network for a loss, which is returned as the mean over all samples of the step."""
        count = self._total(float(sum(len(each["real"]) for each in micro_batches)))
        logged = torch.zeros((), device=self.config.device)
        self.forget(network)
        for each in micro_batches:
            loss_sum = loss(self.gan, to_device(each, self.config.device))
            torch.autograd.backward(loss_sum * (dist.get_world_size() / self.copies / count))
            logged += loss_sum.detach()
        self.clip(network)
        self.step(network)
        return self._total(logged) / count

    def _total(self, number: float | Tensor) -> Tensor:
        """Return the sum of a number over the ranks with different data."""
        summed = torch.as_tensor(number, device=self.config.device).clone()
        dist.all_reduce(summed)
        return summed / self.copies

    def loss_of_discriminator(self, gan: Any, batch: Batch) -> Tensor:
        """Return the loss of the discriminator's turn."""
        return loss_of_discriminator(gan, batch)

    def forget(self, network: str) -> None:
        """Forget the gradients that another turn has left in a network."""
        self.optimizers[network].zero_grad()

    def clip(self, network: str) -> None:
        """Clip the gradients of a network."""
        clip_grad_norm_(self.networks[network].parameters(), self.config.max_norm)

    def step(self, network: str) -> None:
        """Let the optimizer of a network step."""
        self.optimizers[network].step()


@own_loop(**DECLARED)
def adversaries(config: LoopConfig) -> Iterator[Tensor]:
    """Train both networks in turns."""
    trainer = Trainer(config)
    for micro_batches in config.steps:
        yield from trainer.train_step(micro_batches)
