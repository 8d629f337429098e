"""Linear layers in float8 as one process computes them: operands that are scaled, rounded and multiplied in fp32.

Each operand is multiplied by a scale that takes its largest absolute value to the largest float8 number, and rounded;
the product of two is taken of the rounded numbers over their scales. With scaling `tensorwise` an operand has one
scale, and gradients of outputs are of the format with more exponents (arXiv:2209.05433); the weight is that of the
masters, whose scale all ranks agree on. With `rowwise` each row or column that a product adds up has its own, rounded
down to a power of two, all operands are of the format with more digits, and the weight has the dtype of computation.
Source: https://docs.pytorch.org/ao/stable/workflows/training.html
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from conformance.oracles.float8 import multiplied_in_float8
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer

_PRECISE, _WIDE = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12
"""Least absolute value that a scale takes for the largest of an operand."""


class _Rounded(NamedTuple):
    """Float8 numbers, each its number times the scale."""

    numbers: Tensor
    scale: Tensor
    """fp32, a scalar or of one row or column."""

    @property
    def values(self) -> Tensor:
        """Values in fp32, with the strides of the numbers."""
        return self.numbers.float() / self.scale

    @property
    def transposed(self) -> "_Rounded":
        """Transposed numbers, with a scale that is transposed with them."""
        return _Rounded(self.numbers.t(), self.scale.t() if self.scale.ndim else self.scale)


def _rounded(tensor: Tensor, dtype: torch.dtype = _PRECISE, *, dim: int | None = None) -> _Rounded:
    """Round a tensor with one scale, or with one, a power of two, for each sum along a dimension."""
    largest = tensor.abs().max() if dim is None else tensor.abs().amax(dim, keepdim=True)
    most = torch.finfo(dtype).max
    scale = (most / largest.double().clamp(min=_SMALLEST)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return _Rounded((tensor.float() * scale).clamp(-most, most).to(dtype), scale)


class _Tensorwise(torch.autograd.Function):
    """Product of rows with the transpose of a weight, of which float8 numbers are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, numbers, scale)
        return _product(_rounded(x), _Rounded(numbers, scale).transposed, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, numbers, scale = ctx.saved_tensors
        rounded = _rounded(grad, _WIDE)
        own = _product(rounded, _Rounded(numbers, scale), grad.dtype)
        return own, _product(rounded.transposed, _rounded(x), grad.dtype), None, None


class _Rowwise(torch.autograd.Function):
    """Product of rows with the transpose of a weight, each operand of which has a scale for each sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_rounded(x, dim=1), _rounded(weight.t(), dim=0), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        own = _product(_rounded(grad, dim=1), _rounded(weight.t(), dim=1).transposed, grad.dtype)
        return own, _product(_rounded(grad, dim=0).transposed, _rounded(x, dim=0), grad.dtype)


def _product(left: _Rounded, right: _Rounded, dtype: torch.dtype) -> Tensor:
    return torch.mm(left.values, right.values).to(dtype)


def multiply_in_float8(model: Transformer, masters: Mapping[str, Tensor], config: TrainerConfig) -> None:
    """Let the linear layers of a model multiply as `config.float8` says; `masters` are the full weights by name."""
    for name in multiplied_in_float8(config):
        layer = cast("nn.Linear", model.get_submodule(name.removesuffix(".weight")))
        rounded = _rounded(masters[name]) if config.float8 == "tensorwise" else None
        if rounded is not None:
            layer.weight.data = rounded.numbers.to(layer.weight.dtype) / rounded.scale
        layer.forward = partial(_forward, layer, rounded)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, weight: _Rounded | None, x: Tensor) -> Tensor:
    """Return the output of a layer; the bias is added to the rounded product."""
    rows = x.reshape(-1, x.shape[-1])
    if weight is None:
        product: Tensor = _Rowwise.apply(rows, layer.weight)  # type: ignore[no-untyped-call]
    else:
        product = _Tensorwise.apply(rows, layer.weight, *weight)  # type: ignore[no-untyped-call]
    out = product.reshape(*x.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias.to(out.dtype)
