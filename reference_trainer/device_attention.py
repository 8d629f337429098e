"""Fused attention operators of accelerators on the CPU, which has no kernel of them: flash, efficient and cuDNN.

Ring attention of `torch.distributed.tensor.experimental.context_parallel` merges the outputs and log-sum-exps of these
operators, so without them none of its code runs. Here they are the CPU's own flash attention, which has another name
and other arguments; they are registered for the CPU, for which torch has none, and replace nothing. A kernel of a
device is another matter: nothing here says that it is right.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
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


def _call_with_bias(
    operator: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """Call the efficient or the cuDNN operator, which take a bias, and whether backward needs the log-sum-exps."""
    needs_sums = any(each.requires_grad for each in (query, key, value))
    output: Tensor = operator(query, key, value, None, needs_sums, 0.0, is_causal, scale=scale)[0]
    return output


_CALLS: Mapping[str, Callable[..., Tensor]] = {
    "flash": _call_flash,
    "efficient": functools.partial(_call_with_bias, _aten._scaled_dot_product_efficient_attention),
    "cudnn": functools.partial(_call_with_bias, _aten._scaled_dot_product_cudnn_attention),
}


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


# The operators with the arguments of their schemas (aten/src/ATen/native/native_functions.yaml).


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    _mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, sums = _without_dropout(query, key, value, dropout, is_causal, scale)
    return output, sums, None, None, query.shape[2], key.shape[2], _seed(query), _seed(query), query.new_empty(0)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _bias: Tensor | None,
    needs_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    output, sums = _without_dropout(query, key, value, dropout, is_causal, scale)
    return output, sums if needs_sums else sums.new_empty(0), _seed(query), _seed(query)


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _bias: Tensor | None,
    _needs_sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    _mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, sums, *others = _flash(query, key, value, dropout, is_causal, scale=scale)
    return output, sums.unsqueeze(-1), *others[:-1], None


def _without_dropout(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if dropout:
        raise NotImplementedError("the CPU's stand-in of fused attention knows no dropout")
    return attention(query, key, value, is_causal=is_causal, scale=scale)


def _seed(query: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=query.device)


def _flash_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return attention_gradients(*arguments[:6], is_causal=arguments[11], scale=scale)


def _efficient_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor | None, ...]:
    """Return the gradients, and none of the bias, which stands before the output."""
    inputs, outputs, rest = arguments[:4], arguments[5:7], arguments[7:]
    is_causal = rest[4] if len(rest) > 4 else False
    return *attention_gradients(*inputs, *outputs, is_causal=is_causal, scale=scale), None


def _cudnn_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; log-sum-exps have a dimension more."""
    grad, query, key, value, output, sums, *rest = arguments
    sums = sums.squeeze(-1)
    return attention_gradients(grad, query, key, value, output, sums, is_causal=rest[8], scale=scale)
