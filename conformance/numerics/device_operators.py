"""Operators that torch calls on CUDA but not on a processor, computed by the processor.

The simulated device chooses as CUDA does, with the processor's kernels. An oracle of its runs must call the same
operators on the CPU: they round in other places, and DTensor shards them differently.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.torch_release import release

SIMULATED = "sim"
"""Type of the simulated device."""
_NORMS_SINCE = (2, 9)
"""First release of torch in which DTensor shards RMSNorm in one operator, as it is on CUDA."""


def kernel_device(device_type: str) -> str:
    """Return the type of the device whose kernels a device uses."""
    return "cpu" if device_type == SIMULATED else device_type


@contextmanager
def chosen_as_on(device_type: str, dtype: torch.dtype, *, head_dim: int) -> Iterator[None]:
    """Open a context in which the kernel device calls the operators of a device, for a model's dtype and heads.

    Nothing changes for devices with their own kernels.
    """
    if device_type != SIMULATED:
        yield
        return
    norms = fused_norms()
    with nullcontext() if has_fused_attention(dtype, head_dim=head_dim) else sdpa_kernel(SDPBackend.MATH):
        yield
    del norms


def has_fused_attention(dtype: torch.dtype, *, head_dim: int) -> bool:
    """Return whether the simulated device computes causal attention in one operator, or as products and a softmax.

    Flash attention takes 16 bits, efficient attention fp32 if rows of a head are multiples of 16 bytes;
    csrc/attention.cpp of the device names the sources of the rules.
    """
    return dtype.itemsize == 2 or (dtype == torch.float32 and head_dim % 4 == 0)


def has_fused_norms() -> bool:
    """Return whether RMSNorm is one operator on devices, also of DTensors."""
    return release(str(torch.__version__)) >= _NORMS_SINCE


def fused_norms() -> torch.library.Library | None:
    """Give processors RMSNorm in one operator while the result lives; returns None if torch has no such operator.

    Its numbers are those of the operators of which torch composes it on a processor (`rms_norm_composite` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/layer_norm.cpp), and its gradients those of
    autograd, in every bit.
    """
    if not has_fused_norms():
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in (("_fused_rms_norm", _norm), ("_fused_rms_norm_backward", _norm_backward)):
        library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    return library


def _norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the norm of `x` over its last dimensions, and the reciprocal of each root mean square in fp32 or fp64."""
    wide = _widened(x)
    margin = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = (wide.pow(2).mean(_last(shape), keepdim=True) + margin).rsqrt()
    normalised = wide * rstd
    out = normalised if weight is None else normalised * weight
    return out.contiguous().to(x.dtype), rstd.contiguous()


def _norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `x` and of the weight; None for those that are not wanted."""
    wide, wide_grad = _widened(x), _widened(grad)
    normalised_grad = wide_grad if weight is None else wide_grad * weight
    rstd_grad = (normalised_grad * wide).sum(_last(shape), keepdim=True)
    mean_grad = -0.5 * rstd_grad * rstd.pow(3)
    squares_grad = mean_grad.expand(x.shape) / math.prod(shape)
    x_grad = normalised_grad * rstd + squares_grad * (2 * wide)
    weight_grad = None
    if weight is not None and wanted[1]:
        weight_grad = (wide_grad * (wide * rstd)).sum(list(range(x.ndim - len(shape)))).to(weight.dtype)
    return x_grad.to(x.dtype) if wanted[0] else None, weight_grad


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _last(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))
