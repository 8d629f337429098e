"""Clipping of non-finite gradients by the trainer."""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace
from torch import Tensor

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.non_finite import ClippingReached, NonFiniteInjector
from conformance.run.experiment import Needs
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_WHEN: tuple[Literal["backward", "reduced"], ...] = ("backward", "reduced")


class ClipOutcome(msgspec.Struct):
    """Outcome of clipping on one rank."""

    raised: bool
    """True if the trainer raised an error because a number was not finite."""
    norm_is_finite: bool
    """True if the norm that the trainer logged last was finite."""


@experiment(needs=Needs.TRAINING)
def clip_non_finite(rank: RankWorld) -> dict[str, ClipOutcome]:
    """Make gradients of the last rank non-finite and clip them, in several situations.

    The name of a situation consists of the trainer's setting (`raise` or `go-on`), the point in time at which the
    gradient is changed, and the value, such as `raise/backward/nan`.
    """
    outcomes = {}
    for setting in ("raise", "go-on"):
        optimizer = replace(rank.config.optimizer, error_if_nonfinite=setting == "raise")
        injector = _StopAfterClipping(active=rank.is_last)
        trainer = rank.trainer(injector, config=replace(rank.config, optimizer=optimizer))
        for when in _WHEN:
            for value in (math.nan, math.inf):
                injector.when, injector.value = when, value
                raised = _raises(trainer)
                outcomes[f"{setting}/{when}/{value}"] = ClipOutcome(raised, injector.norm_is_finite)
                trainer.optimizer.zero_grad()
    return outcomes


class _StopAfterClipping(NonFiniteInjector):
    """Injector that ends the step once gradients are clipped, and records whether the norm was finite."""

    def __init__(self, *, active: bool) -> None:
        super().__init__(active=active)
        self.norm_is_finite = True

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        self.norm_is_finite = bool(norm.isfinite())
        raise ClippingReached


def _raises(trainer: Trainer) -> bool:
    """Return whether clipping in the first step raises because of a number that is not finite."""
    try:
        trainer.train_step(0)
    except ClippingReached:
        return False
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return True
    raise RuntimeError("a step has ended without clipping")
