"""Dropout with given masks (arXiv:1207.0580), rescaled to keep the mean: kept elements are divided by 1 - p."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from reference_trainer.model import Transformer

CALLS_PER_BLOCK = 2
"""Calls of dropout in a block: after attention, and after the feed-forward network."""
Rounding = Literal["processor", "traced", "device"]
"""Rounding of dropout: several operators of a processor, one operator of a graph there, or one of a device."""


@dataclass(frozen=True, eq=False)
class Masks:
    """Random and rounded decisions of a run; two objects are never equal, so that caches may tell runs apart."""

    by_step: Mapping[int, Sequence[Tensor]]
    """Masks of the global batch in the order of the forward pass: bool, (samples, seq_len, dim), True if kept."""
    choices: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """Experts that routers chose for the tokens of the global batch, by step and block."""

    def of(self, step: int) -> Sequence[Tensor]:
        """Return the masks of a step; none without dropout."""
        return self.by_step.get(step, ())


class _NativeDropout(torch.autograd.Function):
    """`aten::native_dropout` with a given mask, whose backward rounds differently from its forward.

    CPU: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Dropout.cpp

    CUDA: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Dropout.cu computes in the
    accumulation type, and rounds once: `src * rand * scale` in `fused_dropout_kernel`, `mask * src * scale` in
    `masked_scale_kernel`, with a mask of 0 and 1. The scale of forward is the reciprocal of 1 - p in that type, that of
    backward the reciprocal of 1 - p in fp64; both are then numbers of that type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, kept: float, on_device: bool) -> Tensor:
        """Return activations of any shape and floating dtype times 0 or 1 / kept, on the CPU in their dtype."""
        ctx.save_for_backward(mask)
        ctx.kept = kept
        return x * mask * _scale_on_device(kept, x.dtype) if on_device else x * mask.to(x.dtype).div_(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the activations, times a number in fp32, or in fp64 as they are."""
        (mask,) = ctx.saved_tensors
        return grads[0] * mask * (1.0 / ctx.kept), None, None, None


def _scale_on_device(kept: float, dtype: torch.dtype) -> float:
    accumulated = torch.promote_types(dtype, torch.float32)
    return float(torch.tensor(kept, dtype=accumulated).double().reciprocal().to(accumulated))


class _Replayed(nn.Module):
    """Dropout that takes the next mask of each call, and rounds as torch does; on a processor x * (mask / (1 - p))."""

    def __init__(self, probability: float, masks: Iterator[Tensor], rounding: Rounding) -> None:
        super().__init__()
        self._kept, self._masks, self._rounding = 1.0 - probability, masks, rounding

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of any floating dtype, of the shape of the next mask."""
        mask = next(self._masks).to(x.device)
        if self._rounding == "processor":
            return x * mask.to(x.dtype).div_(self._kept)
        on_device = self._rounding == "device"
        return _NativeDropout.apply(x, mask, self._kept, on_device)  # type: ignore[no-untyped-call, no-any-return]


def replay(model: Transformer, masks: Sequence[Tensor], *, rounding: Rounding = "processor") -> None:
    """Replay masks in the next forward of a model, one for each call; without masks nothing changes."""
    if not masks:
        return
    call_masks = iter(masks)
    for block in model.blocks.values():
        own = iter([*islice(call_masks, CALLS_PER_BLOCK)])  # of a block that is left out nothing is replayed
        block.dropout = _Replayed(model.config.dropout, own, rounding)  # type: ignore[assignment]
