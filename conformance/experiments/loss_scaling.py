"""Loss scaling: reaction of all ranks to a gradient that has overflowed on one rank."""

import math

import msgspec
import torch

from conformance.experiments.clipping import NonFiniteInjector
from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.capture import fingerprint
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from reference_trainer.train import Trainer

_CHANGED_GRADIENTS = ("tok_embeddings.weight", "norm.weight")
_ANY_GRADIENT = (None,)
"""Any of the last rank's: with a pipeline it depends on the schedule which layers the rank has."""


class OverflowOutcome(msgspec.Struct):
    """Reaction of one rank to a step in which a gradient has overflowed on the last rank, and to the step after."""

    skipped: bool
    """True if the step was skipped."""
    scale_before: float
    """Loss scale of the step."""
    scale: float
    """Loss scale of the step after."""
    changed: list[str]
    """Names of parameters and optimizer state that the step changed."""
    changed_next: list[str]
    """Names of parameters and optimizer state that the step after changed."""


@experiment(needs=Needs.TRAINING)
def overflow_on_last_rank(rank: RankWorld) -> dict[str, OverflowOutcome]:
    """Make a reduced gradient of the last rank non-finite and train on; returns outcomes, such as for `inf in NAME`."""
    injector = NonFiniteInjector(active=rank.is_last)
    trainer = rank.trainer(injector)
    trainer.train_step(0)
    outcomes: dict[str, OverflowOutcome] = {}
    for name in _CHANGED_GRADIENTS if rank.config.mesh.pp == 1 else _ANY_GRADIENT:
        for value in (math.inf, math.nan):
            before = _state(trainer)
            injector.when, injector.name, injector.value = "scaled", name, value
            overflowed = trainer.train_step(2 * len(outcomes) + 1)
            injector.when = "never"
            between = _state(trainer)
            following = trainer.train_step(2 * len(outcomes) + 2)
            outcomes[f"{value} in {name or 'a gradient'}"] = OverflowOutcome(
                skipped=overflowed.skipped,
                scale_before=overflowed.loss_scale,
                scale=following.loss_scale,
                changed=_changed(before, between),
                changed_next=_changed(between, _state(trainer)),
            )
    return outcomes


def _state(trainer: Trainer) -> dict[str, str]:
    """Return fingerprints of this rank's shards of parameters and optimizer state, by name."""
    fingerprints = {}
    for name, parameter in trainer.model.named_parameters():
        fingerprints[name] = fingerprint(local(parameter.detach()))
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                fingerprints[f"{name} {key}"] = fingerprint(local(value))
    return fingerprints


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before | after if before.get(name) != after.get(name))
