"""Tokens with which the model is called: a batch may still change after the trainer has reported it."""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.instruments.capture import fingerprint
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


class ModelInputs(Observer):
    """Collector of the tokens with which the model is called in the forward phase.

    Leaves `model_inputs` of `facts.RankFacts`.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._tokens: list[Tensor] = []
        self._phase: Phase = "build"

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase; when the optimizer is about to step, digest the tokens of the step."""
        self._phase = name
        if name == "optimizer" and self._tokens:  # only the first stage of a pipeline has tokens
            self.digests.append(fingerprint(torch.cat(self._tokens)))
            self._tokens.clear()

    def initialized(self, model: Transformer) -> None:
        """Hook the forward of the model, or of the first stage of a pipeline."""
        if model.is_first:
            (model.stages[0] if model.stages else model).register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._phase == "forward":
            self._tokens.append(inputs[0])
