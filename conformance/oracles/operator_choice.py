"""Operators that torch chooses by the device: fused attention and norms, or the steps that they stand for.

Sources: ATen/native/transformers/cuda/sdp_utils.cpp (flash attention takes 16 bits, efficient attention rows whose
bytes are a multiple of its alignment), ATen/native/transformers/sdp_utils_cpp.cpp (the CPU's takes all models here),
ATen/native/native_functions.yaml (`_fused_rms_norm` has a kernel for CUDA and none for the CPU).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.oracles.dtype_policy import dtype_policy
from reference_trainer.config import TrainerConfig

_EFFICIENT_ROW_BYTES = 16


def has_fused_attention(config: TrainerConfig, device_type: str) -> bool:
    """Return whether a device computes attention by one operator; for CUDA by a query of torch on a CUDA device.

    Raises ValueError for a type of device whose choice is not known.
    """
    dtype: torch.dtype = getattr(torch, dtype_policy(config.precision).compute)
    head_dim = config.model.dim // config.model.n_heads
    match device_type:
        case "cpu":
            return True
        case "sim":
            return dtype.itemsize == 2 or head_dim * dtype.itemsize % _EFFICIENT_ROW_BYTES == 0
        case "cuda":
            heads = torch.empty(1, 1, config.data.seq_len, head_dim, dtype=dtype, device="cuda", requires_grad=True)
            params = cuda.SDPAParams(heads, heads, heads, None, 0.0, True, False)
            kernels = (
                cuda.can_use_flash_attention,
                cuda.can_use_efficient_attention,
                cuda.can_use_cudnn_attention,
            )
            return any(can_use(params) for can_use in kernels)
    raise ValueError(f"no operators of attention are known for a device of type {device_type!r}: add them here")


def add_up_norms_as_on(device_type: str, model: nn.Module) -> None:
    """Let autograd first add up the terms of each norm's gradient, where the norm is one operator."""
    if device_type == "cpu":
        return
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(_take_a_view)


def _take_a_view(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,) = args
    return (x.view_as(x),)


@contextmanager
def attention_as_on(device_type: str, config: TrainerConfig) -> Iterator[None]:
    """Use products and a softmax for attention where a device of this type does; raises as `has_fused_attention`."""
    if has_fused_attention(config, device_type):
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield
