"""What the model is really given: between the trainer's micro-batches and its forward a batch may still be changed."""

from typing import Any

import torch
from torch import Tensor, nn

from conformance.instruments.capture import fingerprint
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase


class ModelInputs(Observer):
    """Digests of the tokens with which the model is called in the forward phase."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        """Of each step, the fingerprint of the tokens of all its micro-batches, (samples, sequence)."""
        self._tokens: list[Tensor] = []
        self._phase: Phase = "build"

    def phase(self, name: Phase, *, step: int) -> None:
        self._phase = name
        if name == "optimizer":
            self.digests.append(fingerprint(torch.cat(self._tokens)))
            self._tokens.clear()

    def initialized(self, model: Transformer) -> None:
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, _model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._phase == "forward":
            self._tokens.append(inputs[0])
