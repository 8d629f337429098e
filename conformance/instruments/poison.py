"""Poison: memory that `to_empty` hands out is overwritten, so that zero pages cannot pass for initialised memory."""

import torch
from torch import Tensor

from conformance.instruments.sharding import local
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer

INTEGER_POISON = 0x5A
"""In each byte of an integer tensor: small enough for every integer dtype, and no plausible initial value."""


def poison_(tensor: Tensor) -> None:
    """Fill this rank's part with NaN (floating point), INTEGER_POISON (integers) or True (booleans)."""
    part = local(tensor)
    if part.is_floating_point() or part.is_complex():
        part.fill_(torch.nan)
    else:
        part.fill_(True if part.dtype == torch.bool else INTEGER_POISON)


def poisoned_elements(tensor: Tensor) -> int:
    """How many elements of this rank's part still hold poison. Booleans cannot show it and count as clean."""
    part = local(tensor)
    if part.is_floating_point() or part.is_complex():
        return int(part.isnan().sum())
    return 0 if part.dtype == torch.bool else int((part == INTEGER_POISON).sum())


class Poison(Observer):
    """Poisons every parameter and buffer when it is given memory; counts what is left of it after initialisation."""

    def __init__(self) -> None:
        self.poisoned: dict[str, int] = {}
        """Elements filled, by name of parameter or buffer, on this rank."""
        self.noticed: dict[str, int] = {}
        """Of these, the elements that were found to be poison before anything was initialised."""
        self.parts: list[int] = []
        """How many parameters and buffers were given memory at once, in order."""
        self.surviving: dict[str, int] = {}
        """Elements that initialisation has not overwritten."""

    def materialized(self, model: Transformer) -> None:
        before = len(self.poisoned)
        for name, tensor in _state(model):
            if name not in self.poisoned and not tensor.is_meta:
                poison_(tensor)
                self.poisoned[name] = local(tensor).numel()
                self.noticed[name] = poisoned_elements(tensor)
        self.parts.append(len(self.poisoned) - before)

    def initialized(self, model: Transformer) -> None:
        self.surviving = {name: poisoned_elements(tensor) for name, tensor in _state(model)}


def _state(model: Transformer) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
