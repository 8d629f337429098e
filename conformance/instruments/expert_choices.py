"""Experts that routers choose in forward."""

from collections import Counter
from typing import Any

from torch import Tensor, nn

from reference_trainer.experts import Routes
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase

_FOLDERS: dict[Phase, str] = {"forward": "experts", "evaluate": "evaluated_experts"}


class ExpertChoices(Observer):
    """Observer of the routers of a model.

    `tensors` holds the experts of a rank's tokens by the key `stepN/experts/PASS/BLOCK`, where PASS is the number of
    the forward pass in the step: int64, (tokens, experts_per_token). Those of evaluations are below `evaluated_experts`
    instead. Choices of a device are held there until the step is over.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._phase: Phase = "build"
        self._step = -1
        self._passes: Counter[str] = Counter()
        """Forward passes of the step so far, by the folder of their choices."""

    def initialized(self, model: Transformer) -> None:
        """Hook each router."""
        for index, mixture in enumerate(model.mixtures):
            mixture.router.register_forward_hook(self._noting(index))

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase; when the step is over, its choices are copied to the host."""
        self._phase, self._step = name, step
        if name in _FOLDERS:
            self._passes[_FOLDERS[name]] += 1
        if name == "idle":
            self.tensors = {key: experts.cpu() for key, experts in self.tensors.items()}
            self._passes.clear()

    def _noting(self, index: int) -> Any:
        def note(_router: nn.Module, _inputs: Any, routes: Routes) -> None:
            if folder := _FOLDERS.get(self._phase):  # not where it is recomputed
                self.tensors[f"step{self._step}/{folder}/{self._passes[folder] - 1}/{index}"] = routes.experts

        return note
