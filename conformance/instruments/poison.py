"""Poison: memory that `to_empty` hands out is overwritten, so that zero pages cannot pass for initialised memory."""

import torch
from torch import Tensor

from conformance.instruments.sharding import local
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer

INTEGER_POISON = 0x5A
"""Poison of integers: small enough for every integer dtype, and no plausible initial value."""


def poison_(tensor: Tensor) -> None:
    """Fill this rank's shard with NaN (floating point, complex), INTEGER_POISON (integers) or True (booleans).

    The tensor has any shape and dtype, and is plain or a DTensor.
    """
    shard = local(tensor)
    if shard.is_floating_point() or shard.is_complex():
        shard.fill_(torch.nan)
    else:
        shard.fill_(True if shard.dtype == torch.bool else INTEGER_POISON)


def poisoned_elements(tensor: Tensor) -> int:
    """Return the number of elements of this rank's shard that still hold poison.

    The tensor has any shape and dtype; booleans cannot show poison and count as clean.
    """
    shard = local(tensor)
    if shard.is_floating_point() or shard.is_complex():
        return int(shard.isnan().sum())
    return 0 if shard.dtype == torch.bool else int((shard == INTEGER_POISON).sum())


class Poison(Observer):
    """Poisons each parameter and buffer when it is materialised, and counts the poison after initialisation.

    Leaves `poisoned`, `materialized`, `noticed_poison` and `surviving_poison` of `facts.RankFacts`.
    """

    def __init__(self) -> None:
        self.poisoned: dict[str, int] = {}
        self.noticed: dict[str, int] = {}
        self.materialized_at_once: list[int] = []
        self.surviving: dict[str, int] = {}

    def materialized(self, model: Transformer) -> None:
        """Poison the parameters and buffers that have been materialised since the last call."""
        before = len(self.poisoned)
        for name, tensor in _state(model):
            if name not in self.poisoned and not tensor.is_meta:
                poison_(tensor)
                self.poisoned[name] = local(tensor).numel()
                self.noticed[name] = poisoned_elements(tensor)
        self.materialized_at_once.append(len(self.poisoned) - before)

    def initialized(self, model: Transformer) -> None:
        """Count the poison that initialisation has not overwritten."""
        self.surviving = {name: poisoned_elements(tensor) for name, tensor in _state(model)}


def _state(model: Transformer) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
