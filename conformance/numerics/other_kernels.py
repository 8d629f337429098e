"""Kernels of another library, for the CPU: products, sums, norms, softmax and attention that add in another order.

Such a kernel chooses an order as libraries for devices do: by the operator, and by dtype, shape, strides and alignment
of each operand; here they are hashed with a seed. Equal operands are added in the same order in each process. All
numbers are added in fp32 at least and rounded to the dtype of the result once, so that sums of whole numbers stay
exact. Kernels that inductor generates, and operators with an argument `out`, are not replaced.

Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)
_SLICES = 4
"""Maximum number of slices that are added up separately."""
_ALIGNMENT_BYTES = 16


_installed: dict[int, torch.library.Library] = {}
"""The library by its seed; when a library is garbage-collected, its kernels are unregistered."""


def install(seed: int) -> None:
    """Replace torch's CPU kernels in this process, permanently. Raises ValueError for a second seed."""
    if seed in _installed:
        return
    if _installed:
        raise ValueError(f"this process has other kernels already: seed {seed} cannot replace them")
    library = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # that kernels are overridden, which is the purpose
        warnings.simplefilter("ignore")
        for name, kernel in _Kernels(seed).table.items():
            library.impl(name, kernel)  # type: ignore[no-untyped-call]
    _installed[seed] = library


class _Kernels:
    """Kernels that add in orders drawn from a seed; arguments and results are those of the operators in `table`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.table: dict[str, Callable[..., Any]] = {
            "mm": self.mm,
            "bmm": self.bmm,
            "addmm": self.addmm,
            "sum.dim_IntList": self.sum,
            "mean.dim": self.mean,
            "linalg_vector_norm": self.norm,
            "_softmax": self.softmax,
            "_log_softmax": self.log_softmax,
            "nll_loss_forward": self.loss,
            "embedding_dense_backward": self.embedding_backward,
            "_scaled_dot_product_flash_attention_for_cpu": self.attention,
            "_scaled_dot_product_flash_attention_for_cpu_backward": self.attention_backward,
        }

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        if _is_exact(a):
            return _torchs(aten.mm.out, a, b, out=a.new_empty(a.shape[0], b.shape[1]))
        return self._product("mm", a, b).to(a.dtype)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        if _is_exact(a):
            return _torchs(aten.bmm.out, a, b, out=a.new_empty(*a.shape[:2], b.shape[2]))
        return self._product("bmm", a, b).to(a.dtype)

    def addmm(self, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if _is_exact(a):
            out = a.new_empty(a.shape[0], b.shape[1])
            return _torchs(aten.addmm.out, c, a, b, beta=beta, alpha=alpha, out=out)
        return (alpha * self._product("addmm", a, b) + beta * _wide(c)).to(a.dtype)

    def sum(
        self, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        if _is_exact(x) or dtype not in (None, x.dtype):
            is_counted = not (x.is_floating_point() or x.is_complex())
            counted = torch.int64 if is_counted else x.dtype
            out = torch.empty(_reduced_shape(x, dims, keepdim=keepdim), dtype=dtype or counted)
            return _torchs(aten.sum.IntList_out, x, dims, keepdim, dtype=dtype, out=out)
        return self._sum("sum", _wide(x), dims, keepdim=keepdim, key=x).to(x.dtype)

    def mean(
        self, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        if _is_exact(x) or dtype not in (None, x.dtype):
            out = torch.empty(_reduced_shape(x, dims, keepdim=keepdim), dtype=dtype or x.dtype)
            return _torchs(aten.mean.out, x, dims, keepdim, dtype=dtype, out=out)
        total = self._sum("mean", _wide(x), dims, keepdim=keepdim, key=x)
        return (total / (x.numel() // max(total.numel(), 1))).to(x.dtype)

    def norm(
        self,
        x: Tensor,
        ord: float = 2,
        dims: Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if _is_exact(x) or dtype not in (None, x.dtype) or ord == 0 or math.isinf(ord):
            out = torch.empty(_reduced_shape(x, dims, keepdim=keepdim), dtype=dtype or x.dtype)
            return _torchs(aten.linalg_vector_norm.out, x, ord, dims, keepdim, dtype=dtype, out=out)
        powers = _wide(x).abs().pow(ord)
        return self._sum("norm", powers, dims, keepdim=keepdim, key=x).pow(1 / ord).to(x.dtype)

    def softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if _is_exact(x):
            return _torchs(aten._softmax.out, x, dim, half_to_float, out=torch.empty_like(x))
        shifted = _wide(x) - _wide(x).amax(dim, keepdim=True)
        total = self._sum("softmax", shifted.exp(), [dim], keepdim=True, key=x)
        return (shifted.exp() / total).to(x.dtype)

    def log_softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if _is_exact(x):
            return _torchs(aten._log_softmax.out, x, dim, half_to_float, out=torch.empty_like(x))
        shifted = _wide(x) - _wide(x).amax(dim, keepdim=True)
        total = self._sum("log_softmax", shifted.exp(), [dim], keepdim=True, key=x)
        return (shifted - total.log()).to(x.dtype)

    def loss(
        self, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
    ) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood; `reduction` is 0 for none, 1 for the mean and 2 for the sum."""
        is_sum = weight is None and reduction != 0 and not _is_exact(x)
        losses = x.new_empty(target.shape if is_sum or (reduction == 0 and x.ndim > 1) else ())
        total_weight, asked = x.new_empty(()), 0 if is_sum else reduction
        _torchs(
            aten.nll_loss_forward.output, x, target, weight, asked, ignored, output=losses, total_weight=total_weight
        )
        if not is_sum:
            return losses, total_weight
        valid = (target != ignored).sum().to(x.dtype)
        total = self._sum("nll_loss", _wide(losses), None, keepdim=False, key=x)
        return (total if reduction == 2 else total / valid).to(x.dtype), valid

    def embedding_backward(self, grad: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
        rows_of_grad, indices_of_rows = _wide(grad).reshape(-1, grad.shape[-1]), indices.reshape(-1)
        kept = indices_of_rows != padding
        rows_of_grad, indices_of_rows = rows_of_grad[kept], indices_of_rows[kept]
        if by_frequency:
            rows_of_grad = rows_of_grad / indices_of_rows.bincount(minlength=rows)[indices_of_rows].unsqueeze(1)
        order = torch.arange(len(indices_of_rows))
        if self._hash("embedding", grad, indices) % 2:
            order = order.flip(0)
        total = rows_of_grad.new_zeros(rows, grad.shape[-1])
        return total.index_add_(0, indices_of_rows[order], rows_of_grad[order]).to(grad.dtype)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of (batch, heads, seq_len, head_dim), and the logarithm of each row's sum of exponentials."""
        scores = self._scores("attention", q, k, is_causal=is_causal, mask=attn_mask, scale=scale)
        largest = scores.amax(-1, keepdim=True)
        total = self._sum("attention sums", (scores - largest).exp(), [-1], keepdim=True, key=q)
        log_of_total = largest + total.log()
        mixed = self._product("attention values", (scores - log_of_total).exp(), _wide(v), keys=(q, v))
        return torch.empty_like(q).copy_(mixed), log_of_total.squeeze(-1)

    def attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_of_total: Tensor,
        dropout: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; arXiv:2205.14135, algorithm 4."""
        scores = self._scores("attention backward", q, k, is_causal=is_causal, mask=attn_mask, scale=scale)
        weights, wide_grad = (scores - log_of_total.unsqueeze(-1)).exp(), _wide(grad)
        weights_grad = self._product("gradient of weights", wide_grad, _wide(v).mT, keys=(grad, v))
        rows = self._sum("attention rows", wide_grad * _wide(out), [-1], keepdim=True, key=grad)
        scores_grad = weights * (weights_grad - rows) * _scale(q, scale)
        q_grad = self._product("gradient of q", scores_grad, _wide(k), keys=(grad, k))
        k_grad = self._product("gradient of k", scores_grad.mT, _wide(q), keys=(grad, q))
        v_grad = self._product("gradient of v", weights.mT, wide_grad, keys=(grad, v))
        return _by_sequence(q_grad, q.dtype), _by_sequence(k_grad, q.dtype), _by_sequence(v_grad, q.dtype)

    def _scores(
        self, name: str, q: Tensor, k: Tensor, *, is_causal: bool, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        scores = self._product(name, _wide(q), _wide(k).mT, keys=(q, k)) * _scale(q, scale)
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return scores.masked_fill(~visible, -math.inf)
        return scores if mask is None else scores + _wide(mask)

    def _product(self, name: str, a: Tensor, b: Tensor, *, keys: Sequence[Tensor] | None = None) -> Tensor:
        """Product of matrices, or of batches of matrices, in fp32; the sum over the inner dimension is split."""
        chosen, batch = self._hash(name, *((a, b) if keys is None else keys)), a.shape[:-2]
        a, b = (_wide(x).reshape(-1, *x.shape[-2:]) if batch else _wide(x) for x in (a, b))
        multiply = aten.bmm.out if batch else aten.mm.out
        partials = []
        for begin, end in _slices(a.shape[-1], chosen):
            x, y = a[..., begin:end].contiguous(), b[..., begin:end, :].contiguous()
            partials.append(_torchs(multiply, x, y, out=x.new_empty(*x.shape[:-1], y.shape[-1])))
        return reduce(add, partials).reshape(*batch, *partials[0].shape[-2:])

    def _sum(self, name: str, x: Tensor, dims: Sequence[int] | None, *, keepdim: bool, key: Tensor) -> Tensor:
        reduced = _reduced_dims(x, dims)
        kept = [dim for dim in range(x.ndim) if dim not in reduced]
        rows = x.permute([*kept, *reduced]).reshape([x.shape[dim] for dim in kept] + [-1])
        partials = []
        for begin, end in _slices(rows.shape[-1], self._hash(name, key, *reduced)):
            slice_rows = rows[..., begin:end].contiguous()
            out = slice_rows.new_empty(slice_rows.shape[:-1])
            partials.append(_torchs(aten.sum.IntList_out, slice_rows, [-1], False, out=out))
        total = reduce(add, partials)
        return total.reshape(_reduced_shape(x, dims, keepdim=True)) if keepdim else total

    def _hash(self, *facts: object) -> int:
        spelled = [_layout(fact) if isinstance(fact, Tensor) else str(fact) for fact in (self._seed, *facts)]
        return zlib.crc32("|".join(spelled).encode())


def _torchs(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Tensor:
    """Call a kernel that writes into `out`; such kernels are never replaced."""
    result: Tensor = operator(*arguments, **options)
    return result


def _is_exact(x: Tensor) -> bool:
    """Return whether to call torch's kernel: for dtypes other than fp32 and 16 bits, or no elements."""
    return x.dtype not in (torch.float32, *_LOW) or not x.numel()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _LOW else x


def _layout(x: Tensor) -> str:
    return f"{x.dtype}{tuple(x.shape)}{x.stride()}{x.data_ptr() % _ALIGNMENT_BYTES}"


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _by_sequence(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient with the strides of torch's attention: heads inside of the sequence."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _reduced_dims(x: Tensor, dims: Sequence[int] | None) -> list[int]:
    return sorted(dim % x.ndim for dim in dims) if dims and x.ndim else list(range(x.ndim))


def _reduced_shape(x: Tensor, dims: Sequence[int] | None, *, keepdim: bool) -> list[int]:
    reduced = _reduced_dims(x, dims)
    return [1 if dim in reduced else size for dim, size in enumerate(x.shape) if keepdim or dim not in reduced]


def _slices(length: int, chosen: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each slice of a sum, in the order in which their sums are added."""
    count = min(1 + chosen % _SLICES, length) or 1
    size = -(-length // count)
    slices = [(begin, min(begin + size, length)) for begin in range(0, max(length, 1), size or 1)]
    yield from reversed(slices) if chosen // _SLICES % 2 else slices
