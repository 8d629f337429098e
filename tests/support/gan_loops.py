"""Own loops that train two networks in turns: some that are right, and twins that are wrong in one thing each."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import softplus
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conformance.detection.adversaries import DECLARED, Batch, Trainer, loss_of_generator
from conformance.subjects import LoopConfig, own_loop


class NothingForgotten(Trainer):
    """Trainer in which gradients that the generator's turn gives the discriminator leak into its next step."""

    def forget(self, network: str) -> None:
        if network == "generator":
            super().forget(network)


class OneForgotten(Trainer):
    """Trainer that forgets the gradients with which an optimizer has stepped, and those of another turn never."""

    def forget(self, network: str) -> None:
        pass

    def step(self, network: str) -> None:
        super().step(network)
        self.optimizers[network].zero_grad()


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

    def shard(self, network: Any) -> None:
        super().shard(network)
        network.set_requires_gradient_sync(network is not self.networks["discriminator"])


class DiscriminatorSteps(Trainer):
    """Trainer that lets the discriminator step in the generator's turn, by the gradient that the turn left there."""

    order = ("discriminator", "generator")

    def step(self, network: str) -> None:
        for name in self.order if network == "generator" else [network]:
            self.optimizers[name].step()


class DiscriminatorStepsLater(DiscriminatorSteps):
    order = ("generator", "discriminator")


class OtherClipped(Trainer):
    """Trainer that clips the generator's gradients where the discriminator's should be."""

    def clip(self, network: str) -> None:
        super().clip("generator")


class GatheredTwice(Trainer):
    """Trainer whose discriminator is gathered once more whenever it computes."""

    def shard(self, network: Any) -> None:
        super().shard(network)
        if network is self.networks["discriminator"]:
            for layer in (network[0], network[2]):
                layer.register_forward_pre_hook(gather_again)


def gather_again(layer: Any, _inputs: Any) -> None:
    """Gather a layer once more, behind the hook of FSDP."""
    layer.reshard()
    layer.unshard()


class WholeNetworks(Trainer):
    """Trainer of networks that are one group each, which stays gathered after a forward pass without gradients."""

    def shard(self, network: Any) -> None:
        fully_shard(network, mesh=self.mesh, mp_policy=self.config.mixed_precision)


class KeptWhole(WholeNetworks):
    """Trainer whose networks stay gathered when their own optimizer steps."""

    def shard(self, network: Any) -> None:
        super().shard(network)
        network.set_reshard_after_backward(False)


class GeneratorFirst(Trainer):
    def train_step(self, micro_batches: Sequence[Batch]) -> Iterator[Tensor]:
        yield self.turn("generator", loss_of_generator, micro_batches)
        yield self.turn("discriminator", self.loss_of_discriminator, micro_batches)


class Scheduled(Trainer):
    """Trainer whose optimizers have a schedule each, which is saved and loaded with networks and optimizers."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.schedules = {name: halving(each) for name, each in self.optimizers.items()}

    def step(self, network: str) -> None:
        super().step(network)
        self.schedules[network].step()

    def state(self) -> dict[str, Any]:
        return {"gan": self.gan} | {
            f"{kind} {name}": each
            for kind, group in (("optimizer", self.optimizers), ("schedule", self.schedules))
            for name, each in group.items()
        }


class ScheduleNotLoaded(Scheduled):
    """Trainer that saves and loads the schedule of the discriminator, and forgets the other one."""

    def state(self) -> dict[str, Any]:
        return {name: each for name, each in super().state().items() if name != "schedule generator"}


class MomentsNotLoaded(Scheduled):
    def state(self) -> dict[str, Any]:
        return {name: each for name, each in super().state().items() if name != "optimizer generator"}


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def loop(trainer: type[Trainer], **options: Any) -> Any:
    @own_loop(**DECLARED, **options)
    def train(config: LoopConfig) -> Iterator[Any]:
        made = trainer(config)
        if config.load_from and isinstance(made, Scheduled):
            saved = torch.load(config.load_from / f"{dist.get_rank()}", weights_only=False)
            for name, state in saved.items():
                made.state()[name].load_state_dict(state)
        for micro_batches in config.steps:
            yield from made.train_step(micro_batches)
        if config.save_to and isinstance(made, Scheduled):
            state = {name: each.state_dict() for name, each in made.state().items()}
            torch.save(state, config.save_to / f"{dist.get_rank()}")

    return train


right, nothing_forgotten, not_detached = loop(Trainer), loop(NothingForgotten), loop(NotDetached)
not_reduced, generator_first, gathered_twice = loop(NotReduced), loop(GeneratorFirst), loop(GatheredTwice)
one_forgotten = loop(OneForgotten)
whole_networks, kept_whole = loop(WholeNetworks), loop(KeptWhole)
discriminator_steps, discriminator_steps_later = loop(DiscriminatorSteps), loop(DiscriminatorStepsLater)
other_clipped = loop(OtherClipped)
scheduled, schedule_not_loaded, moments_not_loaded = (
    loop(each, scheduler=halving, resumes=True) for each in (Scheduled, ScheduleNotLoaded, MomentsNotLoaded)
)
