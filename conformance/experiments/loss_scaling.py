"""What ranks measure of loss scaling: who notices that a gradient has overflowed on one of them."""

import math
from typing import Any

import torch

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.experiments.training import rank_config
from conformance.instruments.capture import fingerprint
from conformance.instruments.sharding import local
from conformance.run.ranks.messages import RankContext
from reference_trainer.mesh import destroy_process_group
from reference_trainer.observer import Observer, Phase
from reference_trainer.train import Trainer

_SPOILED = ("tok_embeddings.weight", "norm.weight")


def overflow_on_one_rank(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Spoil a gradient of the last rank once it is reduced, and train on; what this rank makes of each situation.

    A situation is `inf in NAME` or `nan in NAME`: whether the step was `skipped`, the `scale_before` and the `scale` of
    the step after it, and the names of what that step `changed`, and the step after it, `changed_next`.
    """
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        device = start_process_group(context)
        spoiler = _Spoiler(active=context.rank == context.world_size - 1)
        trainer = Trainer(config, device=device, world_size=context.world_size, observer=spoiler)
        spoiler.trainer = trainer
        trainer.train_step(0)
        found: dict[str, dict[str, Any]] = {}
        for name in _SPOILED:
            for value in (math.inf, math.nan):
                before = _state(trainer)
                spoiler.name, spoiler.value = name, value
                spoiled = trainer.train_step(2 * len(found) + 1)
                spoiler.name, between = "", _state(trainer)
                following = trainer.train_step(2 * len(found) + 2)
                found[f"{value} in {name}"] = {
                    "skipped": spoiled.skipped,
                    "scale_before": spoiled.loss_scale,
                    "scale": following.loss_scale,
                    "changed": _changed(before, between),
                    "changed_next": _changed(between, _state(trainer)),
                }
        destroy_process_group()
    return found


class _Spoiler(Observer):
    """Puts a bad number into this rank's part of a gradient that has been reduced."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self.name, self.value = "", 0.0
        self.trainer: Trainer | None = None

    def phase(self, name: Phase, *, step: int) -> None:
        if name == "unscale" and self._active and self.name and self.trainer:
            grad = self.trainer.model.get_parameter(self.name).grad
            assert grad is not None, f"{self.name} has no gradient"
            local(grad).view(-1)[0] = self.value


def _state(trainer: Trainer) -> dict[str, str]:
    """Fingerprints of this rank's parts of parameters and optimizer state, by name."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        found[name] = fingerprint(local(parameter.detach()))
        state = trainer.optimizer.state.get(parameter, {}).items()
        found |= {f"{name} {key}": fingerprint(local(value)) for key, value in state if isinstance(value, torch.Tensor)}
    return found


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before | after if before.get(name) != after.get(name))
