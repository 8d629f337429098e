"""Fused attention operators of accelerators on the CPU, which has no kernel of them: flash, efficient and cuDNN.

Ring attention of `torch.distributed.tensor.experimental.context_parallel` merges the outputs and log-sum-exps of these
operators, so without them none of its code runs. The kernels here compute the formulas of FlashAttention-2
(https://arxiv.org/abs/2307.08691, sections 3.1.1 and 3.1.2) in fp32, or fp64, and round to the dtype of the inputs;
they are registered for the CPU, for which torch has none, and replace nothing. A kernel of a device is another matter:
nothing here says that it is right.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

KERNELS = ("flash", "efficient", "cudnn")
"""Names of the operators in `torch.ops.aten`: `_scaled_dot_product_NAME_attention`."""
_aten = torch.ops.aten


@functools.cache
def register() -> Any:
    """Register the kernels for the CPU, once in a process; they stay as long as the result, which is kept."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, forward, backward in (
        ("flash", _flash, _flash_backward),
        ("efficient", _efficient, _efficient_backward),
        ("cudnn", _cudnn, _cudnn_backward),
    ):
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    return library


@contextmanager
def attention_by(kernel: str) -> Iterator[None]:
    """Let `scaled_dot_product_attention` call one of the operators, as it does on a device that has no other."""
    register()
    original: Callable[..., Tensor] = functional.scaled_dot_product_attention

    @functools.wraps(original)
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return _CALLS[kernel](query, key, value, options.get("is_causal", False), options.get("scale"))

    with patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def _call_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    output: Tensor = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    return output


def _call_efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    needs_sums = any(each.requires_grad for each in (query, key, value))
    output: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, needs_sums, 0.0, is_causal, scale=scale
    )[0]
    return output


def _call_cudnn(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    needs_sums = any(each.requires_grad for each in (query, key, value))
    output: Tensor = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, needs_sums, 0.0, is_causal, False, scale=scale
    )[0]
    return output


_CALLS = {"flash": _call_flash, "efficient": _call_efficient, "cudnn": _call_cudnn}


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of attention, of shapes (batch, heads, queries, head_dim) and without the last one.

    Keys and values may have fewer heads, each for as many neighbouring ones of the queries. The output has the dtype of
    the query, the other one fp32, or fp64.
    """
    wide = _like_heads(key, query), _like_heads(value, query)
    output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, *wide, 0.0, is_causal, scale=scale)
    return output.contiguous(), sums.contiguous()


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of their shapes and dtypes.

    Output and log-sum-exp may be those of more keys than are given: then the gradients are the share of these keys.
    """
    wide = _like_heads(key, query), _like_heads(value, query)
    query_grad, key_grad, value_grad = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, *wide, output, sums, 0.0, is_causal, scale=scale
    )
    return query_grad.contiguous(), _shared_among_heads(key_grad, key), _shared_among_heads(value_grad, value)


def _like_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with a head for each one of the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _shared_among_heads(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Return the sums of gradients over the heads that share one of a tensor."""
    summed: Tensor = gradient.reshape(*tensor.shape[:2], -1, *tensor.shape[2:]).sum(2)
    return summed


def _no_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("the CPU's stand-in of fused attention knows no dropout")


def _empty(query: Tensor) -> Tensor:
    return query.new_empty(0)


def _lengths(query: Tensor, key: Tensor) -> tuple[None, None, int, int]:
    """Return the cumulative lengths of packed sequences, of which there are none, and the longest lengths."""
    return None, None, query.shape[2], key.shape[2]


def _seed(query: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=query.device)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _no_dropout(dropout)
    output, sums = attention(query, key, value, is_causal=is_causal, scale=scale)
    return output, sums, *_lengths(query, key), _seed(query), _seed(query), _empty(query)


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    _cum_queries: Tensor,
    _cum_keys: Tensor,
    _queries: int,
    _keys: int,
    _dropout: float,
    is_causal: bool,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_gradients(grad, query, key, value, output, sums, is_causal=is_causal, scale=scale)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    needs_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _no_dropout(dropout)
    assert bias is None
    output, sums = attention(query, key, value, is_causal=is_causal, scale=scale)
    return output, sums if needs_sums else _empty(sums), _seed(query), _seed(query)


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _bias: Tensor | None,
    output: Tensor,
    sums: Tensor,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    _dropout: float,
    _needed: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    gradients = attention_gradients(grad, query, key, value, output, sums, is_causal=is_causal, scale=scale)
    return *gradients, None


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _needs_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _no_dropout(dropout)
    assert bias is None
    output, sums = attention(query, key, value, is_causal=is_causal, scale=scale)
    return output, sums.unsqueeze(-1), *_lengths(query, key), _seed(query), _seed(query), None


def _cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    _bias: Tensor | None,
    _cum_queries: Tensor,
    _cum_keys: Tensor,
    _queries: int,
    _keys: int,
    _dropout: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shares = sums.squeeze(-1)
    return attention_gradients(grad, query, key, value, output, shares, is_causal=is_causal, scale=scale)
