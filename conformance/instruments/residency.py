"""Which parameters are unsharded at the moments that decide memory and staleness."""

from conformance.instruments.sharding import sharded_parameters
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


class Residency(Observer):
    """Writes down the unsharded parameters after forward, before the optimizer step and at the end of each step."""

    def __init__(self) -> None:
        self.unsharded: dict[str, list[str]] = {}
        """`STEP/MOMENT` to parameter names, for the moments `after_forward`, `at_optimizer`, `after_step`."""
        self._model: Transformer | None = None
        self._names: list[str] = []

    def sharded(self, model: Transformer) -> None:
        self._model, self._names = model, [name for name, _ in model.named_parameters()]

    def phase(self, name: Phase, *, step: int) -> None:
        moment = {"backward": "after_forward", "optimizer": "at_optimizer", "idle": "after_step"}.get(name)
        if moment is None or self._model is None:
            return
        sharded = sharded_parameters(self._model)
        self.unsharded[f"{step}/{moment}"] = [name for name in self._names if name not in sharded]
