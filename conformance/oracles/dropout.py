"""Dropout with given masks, as arXiv:1207.0580 rescaled to keep the mean: kept elements are divided by 1 - p."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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


class _NativeDropout(torch.autograd.Function):
    """`aten::native_dropout` on the CPU with a given mask: its backward rounds otherwise than its forward.

    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Dropout.cpp
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, kept: float) -> Tensor:
        """Return activations of any shape and floating dtype times 0 or 1 / kept, a number in their dtype."""
        ctx.save_for_backward(mask)
        ctx.kept = kept
        return x * mask.to(x.dtype).div_(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the activations, times a number in fp32."""
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * (1.0 / ctx.kept), None, None


class _Replayed(nn.Module):
    """Dropout that takes the next mask of each call, rounding as torch does on the CPU: x * (mask / (1 - p)).

    What is traced is one operator, `aten::native_dropout`.
    """

    def __init__(self, probability: float, masks: Iterator[Tensor], *, traced: bool) -> None:
        super().__init__()
        self._kept, self._masks, self._traced = 1.0 - probability, masks, traced

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of any floating dtype, of the shape of the next mask."""
        mask = next(self._masks).to(x.device)
        if self._traced:
            return _NativeDropout.apply(x, mask, self._kept)  # type: ignore[no-untyped-call, no-any-return]
        return x * mask.to(x.dtype).div_(self._kept)


def replay(model: Transformer, masks: Sequence[Tensor], *, traced: bool = False) -> None:
    """Let the next forward of a model drop what these masks drop, one for each call; without masks nothing changes.

    With `traced` it rounds as blocks do that aot_eager compiles.
    """
    if not masks:
        return
    of_calls = iter(masks)
    for block in model.blocks.values():
        block.dropout = _Replayed(model.config.dropout, of_calls, traced=traced)  # type: ignore[assignment]
