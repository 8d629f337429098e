"""Subjects that are right, and whose models have state beside parameters: it advances with each call, or is kept."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm

from tests.support.subject_models import WIDTH
from tests.support.unusual_subjects import Counting, Model, declare, shard


class Annealed(Counting):
    """Logits that grow with the number of forward passes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 - 0.5 * torch.exp(-self.passes / 4))


annealed = declare(model=Annealed)(shard)


class Iterated(Model):
    """Blocks whose weights are divided by their largest singular value, which each pass iterates further."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            for layer in ("up", "down"):
                block.register_module(layer, spectral_norm(block.get_submodule(layer)))


iterated = declare(model=Iterated)(shard)


@cache
def window(size: int, device: torch.device) -> Tensor:
    """Weights that the first call makes, and later ones find."""
    return torch.hann_window(size, periodic=False, device=device) + 0.5


class Kept(Model):
    """Tensors that a function and a module keep for the next call, in no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            angles = torch.arange(len(x), device=x.device)[:, None] * torch.ones(WIDTH, device=x.device)
            self.tables[len(x)] = angles.cos(), angles.sin()
        cosines, sines = self.tables[len(x)]
        return super().forward(x * window(WIDTH, x.device) + 0.1 * cosines + 0.1 * sines)


kept_between_calls = declare(model=Kept, precisions=["fp32"])(shard)
