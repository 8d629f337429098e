"""Unsharded parameters at the points in time that decide memory and staleness."""

from conformance.instruments.sharding import sharded_parameters
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase

_POINT_AT_PHASE: dict[Phase, str] = {"backward": "after_forward", "optimizer": "at_optimizer", "idle": "after_step"}
"""Point in time by the phase that begins then."""


class Residency(Observer):
    """Record of the unsharded parameters after forward, before the optimizer steps and at the end of each step.

    Leaves `unsharded` of `facts.RankFacts`, whose keys are `STEP/POINT`; POINT is `after_forward`, `at_optimizer` or
    `after_step`.
    """

    def __init__(self) -> None:
        self.unsharded: dict[str, list[str]] = {}
        self._model: Transformer | None = None
        self._names: list[str] = []

    def sharded(self, model: Transformer) -> None:
        """Remember the model and the names of its parameters."""
        self._model, self._names = model, [name for name, _ in model.named_parameters()]

    def phase(self, name: Phase, *, step: int) -> None:
        """Write down the unsharded parameters at the points in time that count."""
        point = _POINT_AT_PHASE.get(name)
        if point is None or self._model is None:
            return
        sharded = sharded_parameters(self._model)
        self.unsharded[f"{step}/{point}"] = [name for name in self._names if name not in sharded]
