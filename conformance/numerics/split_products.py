"""Products in 16 bits whose sums are rounded in two parts, as those of matrices that two ranks shard.

An optimizer such as Muon multiplies matrices in bf16. On shards each rank rounds its partial sum, and the sum of both
is rounded again; one process rounds once. Iterations enlarge the difference, by as much as only a run can tell.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__)
_WITH_SUMMAND = (torch.addmm, Tensor.addmm)


class SplitProducts(TorchFunctionMode):
    """Context in which products of two matrices of the same 16-bit dtype are sums of two products."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a function of torch; see https://docs.pytorch.org/docs/stable/torch.overrides.html."""
        options = dict(options or {})
        if function in _PRODUCTS and _is_split(*arguments[:2]):
            return _product(*arguments[:2])
        if function in _WITH_SUMMAND and _is_split(*arguments[1:3]):
            summand, left, right = arguments[:3]
            return options.get("beta", 1) * summand + options.get("alpha", 1) * _product(left, right)
        return function(*arguments, **options)


def _is_split(left: Any, right: Any) -> bool:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor) and left.ndim == right.ndim == 2):
        return False
    return left.dtype == right.dtype and left.dtype.itemsize == 2 and left.shape[1] > 1


def _product(left: Tensor, right: Tensor) -> Tensor:
    half = left.shape[1] // 2
    return left[:, :half] @ right[:half] + left[:, half:] @ right[half:]
