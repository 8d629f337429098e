"""Dropout with given masks, as arXiv:1207.0580 rescaled to keep the mean: kept elements are divided by 1 - p."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from reference_trainer.model import Transformer

CALLS_PER_BLOCK = 2
"""Calls of dropout in a block: after attention, and after the feed-forward network."""


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks of a run; two objects are never equal, so that caches may tell runs apart."""

    by_step: Mapping[int, Sequence[Tensor]]
    """Masks of the global batch in the order of the forward pass: bool, (samples, seq_len, dim), True if kept."""

    def of(self, step: int) -> Sequence[Tensor]:
        """Return the masks of a step."""
        return self.by_step[step]


class _Replayed(nn.Module):
    """Dropout that takes the next mask of each call, rounding as torch does on the CPU: x * (mask / (1 - p))."""

    def __init__(self, probability: float, masks: Iterator[Tensor]) -> None:
        super().__init__()
        self._kept, self._masks = 1.0 - probability, masks

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of any floating dtype, of the shape of the next mask."""
        return x * next(self._masks).to(device=x.device, dtype=x.dtype).div_(self._kept)


def replay(model: Transformer, masks: Sequence[Tensor]) -> None:
    """Let the next forward of a model drop what these masks drop, one for each call; without masks nothing changes."""
    if not masks:
        return
    of_calls = iter(masks)
    for block in model.blocks.values():
        block.dropout = _Replayed(model.config.dropout, of_calls)  # type: ignore[assignment]
