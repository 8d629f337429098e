"""Samples of operators that a training step could use: calls with descriptions of their arguments.

Losses come with all reductions and options; operators that change their argument in place do so themselves or through a
view of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from conformance.sweeps.operator_algebra import algebra
from conformance.sweeps.operator_samples import Argument, Sample, indices, operators, sample
from conformance.sweeps.operator_writes import writes

_Call = Callable[..., Any]


def samples() -> list[Sample]:
    """Return all samples, in order; no two have the same name.

    Torch has every operator from 2.11 on, the first version that DT-3 is about: one that a version removes is an error.
    """
    return [
        *(replace(each, elementwise=True) for each in (*_unary(), *_binary())),
        *_reductions(),
        *_sorts_and_scans(),
        *_shapes(),
        *_indexing(),
        *_products(),
        *_normalisations(),
        *losses(),
        *writes(),
        *algebra(),
    ]


def _unary() -> Iterator[Sample]:
    exact = (
        "abs neg sign square ceil floor round trunc frac positive isfinite isnan isinf logical_not signbit nan_to_num"
    )
    for name, operator in operators(torch, exact):
        yield sample(name, operator, "a b")
    for name, operator in operators(functional, "relu relu6 hardtanh hardshrink softshrink leaky_relu"):
        yield sample(name, operator, "a b", exact=name != "leaky_relu")
    smooth = (
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan atan sinh cosh tanh asinh sigmoid erf "
        "erfc lgamma digamma i0 sinc deg2rad rad2deg"
    )
    for name, operator in operators(torch, smooth):
        yield sample(name, operator, "a b positive", exact=False)
    for name, operator in operators(torch, "asin acos atanh logit erfinv"):
        yield sample(name, operator, "a b unit", exact=False)
    activations = "gelu silu mish elu selu celu softplus logsigmoid softsign tanhshrink hardsigmoid hardswish glu"
    for name, operator in operators(functional, activations):
        yield sample(name, operator, "a b" if name != "glu" else "a b 4", exact=False)
    yield sample("gelu, tanh", partial(functional.gelu, approximate="tanh"), "a b", exact=False)
    yield sample("glu of dim 0", partial(functional.glu, dim=0), "4 a b", exact=False)
    yield sample("clamp", lambda x: x.clamp(-2, 2), "a b")
    yield sample("clamp by tensors", torch.clamp, "a b", "a b")
    yield sample("threshold", lambda x: functional.threshold(x, 1.0, 20.0), "a b")
    yield sample("prelu", functional.prelu, "a 4 b", "4")
    yield sample("pow", lambda x: x**2, "a b")
    yield sample("pow of a number", lambda x: 2.0**x, "a b", exact=False)
    yield sample("plus a number", lambda x: x + 1, "a b")
    yield sample("number minus", lambda x: 3 - x, "a b")
    for name, operator in operators(torch, "add sub mul div floor_divide remainder"):
        yield sample(f"{name} of a number and", partial(operator, 5), "a b positive", exact=name != "div")
    yield sample("times a number", lambda x: x * 2, "a b")
    yield sample("to another dtype", lambda x: x.to(torch.bfloat16), "a b")
    yield sample("to integers", lambda x: x.long(), "a b")
    yield sample("dropout of nothing", lambda x: functional.dropout(x, 0.0), "a b")
    yield sample("dropout of all", lambda x: functional.dropout(x, 1.0), "a b")
    yield sample("detach", torch.detach, "a b")
    yield sample("clone", torch.clone, "a b")
    yield sample("zeros_like", torch.zeros_like, "a b")
    yield sample("ones_like", torch.ones_like, "a b")
    yield sample("full_like", lambda x: torch.full_like(x, 3.0), "a b")
    yield sample("new_zeros", lambda x: x.new_zeros(x.shape), "a b")
    yield sample("new_ones of another shape", lambda x: x + x.new_ones(x.shape[-1]), "a b")


def _binary() -> Iterator[Sample]:
    exact = (
        "add sub mul maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_xor copysign heaviside "
        "isclose rsub"
    )
    for name, operator in operators(torch, exact):
        yield sample(name, operator, "a b", "a b")
    for name, operator in operators(torch, "fmod remainder floor_divide"):
        yield sample(name, operator, "a b", "a b positive")
    for name, operator in operators(torch, "div float_power atan2 hypot logaddexp logaddexp2 xlogy"):
        yield sample(name, operator, "a b positive", "a b positive", exact=False)
    for name, operator in (("add", torch.add), ("mul", torch.mul), ("sub", torch.sub)):
        yield sample(f"{name} of a row", operator, "a b", "b")
        yield sample(f"{name} of a column", operator, "a b", "a 1")
        yield sample(f"{name} of a scalar", operator, "a b", Argument(()))
    yield sample("add times 2", lambda x, y: torch.add(x, y, alpha=2), "a b", "a b")
    yield sample("where", torch.where, "a b bool", "a b", "a b")
    yield sample("where of a number", lambda mask, x: torch.where(mask, x, 5.0), "a b bool", "a b")
    for name, compare in {"less than": torch.lt, "greater or equal to": torch.ge, "equal to": torch.eq}.items():
        yield sample(f"{name} a number", partial(_compared, compare, 1.0), "a b")
    yield sample("sum of positive ones", lambda x: (x * (x > 0)).sum(), "a b")
    yield sample("any above", lambda x: (x > 3).any(), "a b")
    yield sample("where above", lambda x, y: torch.where(x > y, x, y), "a b", "a b")
    yield sample("lerp", lambda x, y: torch.lerp(x, y, 0.5), "a b", "a b")
    yield sample("lerp by a tensor", torch.lerp, "a b", "a b", "a b")
    yield sample("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), "a b", "a b", "a b")
    yield sample("addcdiv", torch.addcdiv, "a b", "a b", "a b positive", exact=False)
    yield sample("equal", torch.equal, "a b", "a b")
    yield sample("equal numbers", lambda x, y: torch.equal(x.sum(), y.sum()), "a b", "a b")
    yield sample("equal to itself", lambda x: torch.equal(x, x.clone()), "a b")
    yield sample("equal sums of rows", lambda x: torch.equal(x.sum(0), x.clone().sum(0)), "a b")
    yield sample("allclose to itself", lambda x: torch.allclose(x, x.clone()), "a b")


def _compared(compare: _Call, number: float, x: Tensor) -> Tensor:
    """Return where a tensor compares so with a number."""
    where: Tensor = compare(x, number)
    return where


def _reductions() -> Iterator[Sample]:
    dims: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        (" of dim 0", {"dim": 0}),
        (" of dim -1", {"dim": -1}),
        (" of dim 1, kept", {"dim": 1, "keepdim": True}),
    )
    for text, options in dims:
        for name in ["sum", "nansum", "amax", "amin", "all", "any"]:
            domain = "bool" if name in ("all", "any") else "distinct" if name.startswith("am") else ""
            yield sample(f"{name}{text}", partial(getattr(torch, name), **options), f"a b {domain}")
        for name in ["mean", "nanmean", "std", "var", "logsumexp"]:
            if name != "logsumexp" or options:
                yield sample(f"{name}{text}", partial(getattr(torch, name), **options), "a b distinct", exact=False)
        yield sample(f"prod{text}", partial(torch.prod, **options), "a b signs")
        for name in ("argmax", "argmin"):
            yield sample(f"{name}{text}", partial(getattr(torch, name), **options), "a b distinct")
        for name in ["max", "min", "median"]:
            yield sample(f"{name}{text}", partial(getattr(torch, name), **options), "a b distinct")
        for order in (0, 1, 2, 3, float("inf"), float("-inf")):
            call = partial(torch.linalg.vector_norm, ord=order, **options)
            yield sample(f"vector_norm {order}{text}", call, "a b positive", exact=False)
        yield sample(f"var without correction{text}", partial(torch.var, correction=0, **options), "a b", exact=False)
        yield sample(f"aminmax{text}", lambda x, options=options: tuple(torch.aminmax(x, **options)), "a b distinct")
    yield sample("sum of both dims", lambda x: x.sum((0, 1)), "a b 3")
    yield sample("norm of dim 0, sharded", _sharded_norm, "a b", exact=False)
    yield sample("mean of both dims", lambda x: x.mean((0, -1)), "a b 3", exact=False)
    yield sample("sum in fp64", lambda x: x.sum(dtype=torch.float64), "a b")
    yield sample("std_mean", torch.std_mean, "a b", exact=False)
    yield sample("var_mean of dim 0", lambda x: torch.var_mean(x, dim=0), "a b", exact=False)
    yield sample("count_nonzero", torch.count_nonzero, "a b")
    yield sample("count_nonzero of dim 0", lambda x: torch.count_nonzero(x, dim=0), "a b")
    yield sample("norm", torch.norm, "a b", exact=False)
    yield sample("matrix_norm", torch.linalg.matrix_norm, "a b", exact=False)
    yield sample("dist", torch.dist, "a b", "a b", exact=False)
    yield sample("trace", torch.trace, "a b")
    yield sample("item of the sum", lambda x: x.sum().item(), "a b")
    yield sample("amax of a number", lambda x: x.sum().amax(0), "a b")
    yield sample("argmax of a number", lambda x: x.sum().argmax(0), "a b")
    yield sample("sum of dim 0 as truth", lambda x: x.sum(0).bool(), "a b")
    yield sample("max of integers", lambda x: x.max(), "a b labels")
    yield sample("mean of squares", lambda x: (x * x).mean(), "a b", exact=False)


def _sharded_norm(x: Tensor) -> Tensor:
    """Return norms of columns, which ranks add and shard in one collective if they are sharded by rows."""
    norms = torch.linalg.vector_norm(x.detach(), dim=0)
    return norms.redistribute(placements=[Shard(0)] * norms.device_mesh.ndim) if isinstance(norms, DTensor) else norms


def _sorts_and_scans() -> Iterator[Sample]:
    for dim in (0, -1):
        for name in ["cumsum", "cummax", "cummin"]:
            yield sample(f"{name} of dim {dim}", partial(getattr(torch, name), dim=dim), "a b distinct")
        yield sample(f"cumprod of dim {dim}", partial(torch.cumprod, dim=dim), "a b signs")
        yield sample(f"logcumsumexp of dim {dim}", partial(torch.logcumsumexp, dim=dim), "a b", exact=False)
        yield sample(f"sort of dim {dim}", partial(torch.sort, dim=dim), "a b distinct")
        yield sample(f"sort down of dim {dim}", partial(torch.sort, dim=dim, descending=True), "a b distinct")
        yield sample(f"argsort of dim {dim}", partial(torch.argsort, dim=dim), "a b distinct")
        yield sample(f"topk of dim {dim}", partial(torch.topk, k=1, dim=dim), "a b distinct")
        yield sample(f"kthvalue of dim {dim}", partial(torch.kthvalue, k=1, dim=dim), "a b distinct")
        yield sample(f"diff of dim {dim}", partial(torch.diff, dim=dim), "a b")
        yield sample(f"quantile of dim {dim}", lambda x, dim=dim: torch.quantile(x, 0.5, dim=dim), "a b", exact=False)
        yield sample(f"nanmedian of dim {dim}", partial(torch.nanmedian, dim=dim), "a b distinct")
        yield sample(f"unique_consecutive of dim {dim}", partial(torch.unique_consecutive, dim=dim), "a b")
        yield sample(f"renorm of dim {dim}", lambda x, dim=dim: torch.renorm(x, 2, dim % 2, 1.0), "a b", exact=False)
    yield sample("msort", torch.msort, "a b distinct")
    yield sample("sort in order", partial(torch.sort, stable=True), "a b distinct")
    yield sample("unique", torch.unique, "a b")
    yield sample("nonzero", torch.nonzero, "a b bool")
    yield sample("bincount", lambda x: torch.bincount(x, minlength=4), "a labels")
    yield sample("histc between its own ends", lambda x: torch.histc(x, 4), "a b distinct")
    yield sample("multinomial of one certain", lambda x: (1000 * x).softmax(-1).multinomial(1), "a b distinct")
    yield sample("histc", lambda x: torch.histc(x, 4, -4, 4), "a b")
    yield sample("searchsorted", lambda x, y: torch.searchsorted(x.sort(-1).values, y), "a b distinct", "a b")
    yield sample("isin", torch.isin, "a b", "3")


def _shapes() -> Iterator[Sample]:
    calls: dict[str, _Call] = {
        "flatten": torch.flatten,
        "flatten of the last two": lambda x: x.flatten(1),
        "reshape to one": lambda x: x.reshape(-1),
        "view of the first two": lambda x: x.view(-1, x.size(-1)),
        "unflatten": lambda x: x.unflatten(-1, (2, 2)),
        "transpose": lambda x: x.transpose(0, -1),
        "permute": lambda x: x.permute(2, 0, 1),
        "movedim": lambda x: x.movedim(0, -1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "unsqueeze the last": lambda x: x.unsqueeze(-1),
        "squeeze": lambda x: x[:, :1].squeeze(1),
        "squeeze of a larger dim": lambda x: x.squeeze(0),
        "squeeze of any": lambda x: x.squeeze(),
        "squeeze of two": lambda x: x.squeeze((0, 1)),
        "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1),
        "repeat": lambda x: x.repeat(2, 1, 1),
        "tile": lambda x: x.tile((1, 2)),
        "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
        "split": lambda x: x.split(1),
        "chunk": lambda x: x.chunk(2),
        "chunk the last": lambda x: x.chunk(2, -1),
        "unbind": torch.unbind,
        "unbind the last": lambda x: x.unbind(-1),
        "narrow": lambda x: x.narrow(0, 0, 1),
        "narrow the last": lambda x: x.narrow(-1, 1, 2),
        "select": lambda x: x.select(0, -1),
        "select the last": lambda x: x[..., -1],
        "slice": lambda x: x[1:3],
        "slice with a step": lambda x: x[::2],
        "slice the last": lambda x: x[..., 1:3],
        "flip": lambda x: x.flip(0),
        "flip the last": lambda x: x.flip(-1),
        "roll": lambda x: x.roll(1, 0),
        "roll of all": lambda x: x.roll(1),
        "rot90": torch.rot90,
        "tril": torch.tril,
        "triu above": lambda x: x.triu(1),
        "diagonal": lambda x: x.diagonal(),
        "diagonal of the last two": lambda x: x.diagonal(0, -2, -1),
        "diag_embed": torch.diag_embed,
        "unfold": lambda x: x.unfold(-1, 2, 1),
        "unfold the first": lambda x: x.unfold(0, 1, 1),
        "pad": lambda x: functional.pad(x, (1, 2)),
        "pad the first": lambda x: functional.pad(x, (0, 0, 0, 0, 1, 1)),
        "pad by a number": lambda x: functional.pad(x, (1, 0, 2, 0), value=7.0),
        "pad by reflection": lambda x: functional.pad(x, (1, 1), mode="reflect"),
        "pad by replication": lambda x: functional.pad(x, (1, 1), mode="replicate"),
        "pad in a circle": lambda x: functional.pad(x, (1, 1), mode="circular"),
        "contiguous": lambda x: x.transpose(0, 1).contiguous(),
        "pixel_shuffle": lambda x: functional.pixel_shuffle(x.unsqueeze(0).repeat(1, 4, 1, 1), 2),
        "interpolate": lambda x: functional.interpolate(x, scale_factor=2),
        "avg_pool1d": lambda x: functional.avg_pool1d(x, 2),
        "max_pool1d": lambda x: functional.max_pool1d(x, 2),
        "max_pool2d": lambda x: functional.max_pool2d(x.unsqueeze(0), (1, 2)),
        "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 2),
    }
    for name, call in calls.items():
        yield sample(name, call, "a b 4 distinct", exact="avg" not in name)
    for name, view in _REGROUPED.items():
        yield sample(name, view, "a b 4 distinct")
    yield sample("squeeze of ones", lambda x: x.squeeze(), "a 1 b")
    yield sample("squeeze of one", lambda x: x.squeeze(1), "a 1 b")
    yield sample("max_pool2d of one", lambda x: functional.max_pool2d(x, (1, 2)), "a b 4 distinct")
    yield sample("transpose of a vector", torch.t, "a")
    yield sample("the same by strides", lambda x: x.detach().as_strided(x.shape, x.stride()), "a b")
    yield sample("view with ones", lambda x: x.view(x.size(0), 1, 2, -1), "a b 4")
    yield sample("repeat of a number", lambda x: x.sum().repeat(3), "a b")
    yield sample("slice to an end alone", lambda x: torch.ops.aten.slice.Tensor(x, 0, None, 2), "a b")
    yield sample("backward of a slice", _padded_rows, "a b")
    yield sample("size as of another", lambda x, y: x.is_same_size(y), "a b", "b")
    yield sample("pinned", lambda x: x.is_pinned(), "a b")
    yield sample("view of two of four flattened", lambda x: x.detach().flatten().view(2, -1), "4 4 distinct")
    yield sample("cat", lambda x, y: torch.cat([x, y]), "a b", "a b")
    yield sample("cat the last", lambda x, y: torch.cat([x, y], -1), "a b", "a b")
    yield sample("cat of different sizes", lambda x, y: torch.cat([x, y]), "a b", "3 b")
    yield sample("stack", lambda x, y: torch.stack([x, y]), "a b", "a b")
    yield sample("stack the last", lambda x, y: torch.stack([x, y], -1), "a b", "a b")
    yield sample("stack of a row and a sum", lambda x, y: torch.stack([y, x.sum(0)]), "a b", "b")
    yield sample("stack of a sum and a row", lambda x, y: torch.stack([x.sum(0), y]), "a b", "b")
    yield sample("stack of a sum and a maximum", lambda x: torch.stack([x.sum(0), x.amax(0)]), "6 b distinct")
    yield sample("stack of two orders", lambda x, y: torch.stack([x, y.t()]), "a b", "b a")
    yield sample("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), "a", "b")
    yield sample("broadcast_tensors", torch.broadcast_tensors, "a b", "b")
    yield sample("block_diag", torch.block_diag, "a b", "a b")


def _padded_rows(x: Tensor) -> Tensor:
    """Return the gradient of rows of which a slice has taken the first half, as backward of slices computes it."""
    gradient: Tensor = torch.ops.aten.slice_backward(x, [2 * x.size(0), x.size(1)], 0, 0, x.size(0), 1)
    return gradient


_REGROUPED: dict[str, _Call] = {
    "view of twice the rows": lambda x: x.view(2 * x.size(0), -1),
    "view of half the columns": lambda x: x.view(2 * x.size(0), x.size(1), 2),
    "view of exchanged sizes": lambda x: x.view(x.size(1), x.size(0), 4),
    "view of four rows": lambda x: x.view(4, -1),
    "view of two columns": lambda x: x.view(-1, 2),
    "view of two in front": lambda x: x.view(2, x.size(0), -1),
    "view across all sizes": lambda x: x.view(2, 2, x.size(1), x.size(0)),
    "view flattened and back": lambda x: x.view(-1).view(x.shape),
    "view of rows and back": lambda x: x.view(x.size(1), -1).view(x.shape),
}
"""Views whose sizes differ from those of the dimensions that they regroup."""


def _indexing() -> Iterator[Sample]:
    yield sample("index by a tensor", lambda x, i: x[i], "3 b", "a rows")
    yield sample("index the last", lambda x, i: x[..., i], "a 3", "b rows")
    yield sample("index by a matrix", lambda x, i: x[i], "3 b", "a 2 rows")
    yield sample("index by two", lambda x, i, j: x[i, j], "3 3", "a rows", "a rows")
    yield sample("index by two that meet", lambda x, i, j: x[i, j], "3 3", "a 1 rows", "2 rows")
    yield sample("index by one", lambda x, i: x[i], "3 b", "1 rows")
    yield sample("index around a dim", lambda x, i, j: x[i, :, j], "3 a 3", "b rows", "b rows")
    yield sample("index by a mask", lambda x, mask: x[mask], "a b", "a bool")
    yield sample("index_select", lambda x, i: x.index_select(0, i), "3 b", "a rows")
    yield sample("index_select the last", lambda x, i: x.index_select(-1, i), "a 3", "b rows")
    yield sample("gather", lambda x, i: x.gather(0, i), "3 b", "a b rows")
    yield sample("gather the last", lambda x, i: x.gather(-1, i), "a 3", "a b rows")
    yield sample("gather of fewer columns", lambda x, i: x.gather(0, i), "3 6", "2 4 rows")
    yield sample("take", torch.take, "a b 3", "a rows")
    yield sample("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 0), "3 b", "a b rows")
    yield sample("masked_select", torch.masked_select, "a b", "a b bool")
    yield sample("masked_fill", lambda x, mask: x.masked_fill(mask, 9.0), "a b", "a b bool")
    yield sample("masked_fill of rows", lambda x, mask: x.masked_fill(mask, 9.0), "a b", "a 1 bool")
    yield sample("scatter", lambda x, i, y: x.scatter(0, i[:1], y[:1]), "3 b", "a b rows", "a b")
    yield sample("scatter of some", lambda x, i, y: x.scatter(0, i, y), "3 b", "2 b rows", "3 b")
    yield sample("scatter the last", lambda x, i: x.scatter(-1, i[:, :1], 9.0), "a 3", "a b rows")
    yield sample("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), "3 b", "a b rows", "a b")
    yield sample("scatter of fewer sources", lambda x, i, y: x.scatter(0, i, y), "3 4", "2 4 rows", "3 6")
    yield sample("scatter_add of fewer sources", lambda x, i, y: x.scatter_add(0, i, y), "3 4", "2 4 rows", "2 6")
    yield sample("scatter_reduce", lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), "3 b", "a b rows", "a b distinct")
    yield sample("index_add", lambda x, i, y: x.index_add(0, i, y), "3 b", "a rows", "a b")
    yield sample("index_fill", lambda x, i: x.index_fill(0, i, 9.0), "3 b", "2 rows")
    yield sample("index_copy", lambda x, y: x.index_copy(0, indices(x, 2, 0), y), "3 b", "2 b")
    yield sample("index_put", lambda x, i, y: x.index_put((i,), y, accumulate=True), "3 b", "a rows", "a b")
    yield sample("index_put, each once", lambda x, i, y: x.index_put((i,), y), "3 b", "3 places", "3 b")
    yield sample("index_put of two", lambda x, i, j, y: x.index_put((i, j), y), "3 3", *("3 places", "3 rows", "3"))
    yield sample("index_put of columns", lambda x, i, y: x.index_put((i,), y, accumulate=True), "3 b", "a rows", "a 1")
    yield sample("index_copy by a tensor", lambda x, i, y: x.index_copy(0, i, y), "3 b", "3 places", "3 b")
    yield sample("masked_scatter", torch.masked_scatter, "a b", "a b bool", "a b")
    yield sample("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, 0), "a b", "b")
    yield sample("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 0, 0, 1), "a b", "1 b")
    yield sample("one_hot", lambda i: functional.one_hot(i, 3), "a b rows")
    yield sample("embedding", functional.embedding, "a 2 rows", "3 b")
    yield sample("embedding with padding", partial(functional.embedding, padding_idx=0), "a 2 rows", "3 b")
    by_frequency = partial(functional.embedding, scale_grad_by_freq=True)
    yield sample("embedding by frequency", by_frequency, "a 2 rows", "3 b", exact=False)
    for mode in ("sum", "mean", "max"):
        call = partial(functional.embedding_bag, mode=mode)
        yield sample(f"embedding_bag, {mode}", call, "a 2 rows", "3 b", exact=False)
    rows = "a 3 rows"
    yield sample("embedding of sharded rows", lambda i, w: functional.embedding(i, w[:3]), rows, "4 b")


def _products() -> Iterator[Sample]:
    yield sample("mm", torch.mm, "a 3", "3 b")
    yield sample("mm inside", torch.mm, "3 a", "a b")
    yield sample("matmul of stacks", torch.matmul, "a 3 b", "b 2")
    yield sample("matmul of a vector", torch.matmul, "a b", "b")
    yield sample("bmm", torch.bmm, "a 3 b", "a b 2")
    yield sample("grouped_mm", lambda x, w: functional.grouped_mm(x.bfloat16(), w.bfloat16()), "2 8 8", "2 8 8")
    yield sample("grouped_mm of rows", _grouped_rows, "8 8", "2 8 8")
    yield sample("grouped_mm of columns", _grouped_columns, "2 8 8", "8 8")
    yield sample("addmm", torch.addmm, "b", "a 3", "3 b")
    yield sample("addmm, scaled", partial(torch.addmm, beta=2, alpha=3), "a b", "a 3", "3 b")
    yield sample("baddbmm", torch.baddbmm, "a 3 2", "a 3 b", "a b 2")
    yield sample("addbmm", torch.addbmm, "3 2", "a 3 b", "a b 2")
    yield sample("addmv", torch.addmv, "a", "a b", "b")
    yield sample("addr", torch.addr, "a b", "a", "b")
    yield sample("mv", torch.mv, "a b", "b")
    yield sample("dot", torch.dot, "a", "a")
    yield sample("vdot", torch.vdot, "a", "a")
    yield sample("outer", torch.outer, "a", "b")
    yield sample("outer in inference", torch.inference_mode()(torch.outer), "a", "b")
    yield sample("kron", torch.kron, "a 2", "2 b")
    yield sample("tensordot", lambda x, y: torch.tensordot(x, y, 1), "a b", "b 3")
    yield sample("einsum", lambda x, y: torch.einsum("abc,bd->acd", x, y), "a b 2", "b 3")
    yield sample("linear", functional.linear, "a b", "3 b", "3")
    yield sample("linear of stacks", functional.linear, "a 3 b", "2 b")
    yield sample("linear, sharded output", functional.linear, "a 3", "b 3", "b")
    yield sample("bilinear", functional.bilinear, "a 3", "a 2", "b 3 2")
    yield sample("conv1d", functional.conv1d, "a 3 6", "b 3 2", "b")
    yield sample("conv2d", functional.conv2d, "a 2 4 4", "b 2 2 2")
    yield sample("conv2d, padded", partial(functional.conv2d, padding=1, stride=2), "a 2 4 4", "b 2 2 2", "b")
    yield sample("conv2d of a fixed kernel", _convolved, "a 2 4 b")
    yield sample("conv_transpose1d", functional.conv_transpose1d, "a 3 4", "3 b 2")
    yield sample("cross", torch.cross, "a 3", "a 3")
    yield sample("mm of flattened rows", lambda x, w: x.flatten(0, 1) @ w, "a b 4", "4 3")
    yield sample("mm of flattened columns", lambda x, w: x.flatten(1) @ w.flatten(0, 1), "3 a 4", "a 4 b")
    yield sample("mm of both flattened", lambda x, w: x.flatten(0, 1).t() @ w.flatten(0, 1), "a b 4", "a b 2")
    yield sample("add of both flattened", lambda x, y: x.flatten(0, 1) + y.flatten(0, 1), "a b 4", "a b 4")
    yield sample("linear of flattened rows", lambda x, w: functional.linear(x.flatten(0, 1), w), "a b 4", "b 4")
    yield sample("cdist", torch.cdist, "a 3", "b 3", exact=False)
    yield sample("cosine_similarity", functional.cosine_similarity, "a b positive", "a b positive", exact=False)
    yield sample("pairwise_distance", functional.pairwise_distance, "a b", "a b", exact=False)


def _convolved(images: Tensor) -> Tensor:
    """Add up squares of pixels, of which no two ranks share one if the width is sharded evenly: none is exchanged.

    Ranks without the same number of columns wait for each other where they are, in a group without a time limit.
    """
    return functional.conv2d(images, images.new_ones(3, 2, 2, 2), stride=2)


def _grouped_rows(x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows with the matrix of their group, the first four with the first one."""
    ends = (4 * torch.ones_like(w[:, 0, 0])).cumsum(0).to(torch.int32)
    product: Tensor = functional.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends)
    return product


def _grouped_columns(x: Tensor, w: Tensor) -> Tensor:
    """Multiply the matrix of each group with its columns, the first one with the first four."""
    ends = (4 * torch.ones_like(x[:, 0, 0])).cumsum(0).to(torch.int32)
    product: Tensor = functional.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends)
    return product


def _normalisations() -> Iterator[Sample]:
    for name, operator in operators(functional, "softmax log_softmax softmin"):
        for dim in (0, -1):
            yield sample(f"{name} of dim {dim}", partial(operator, dim=dim), "a b", exact=False)
    last = partial(functional.layer_norm, normalized_shape=(4,))
    yield sample("layer_norm", last, "a b 4", exact=False)
    yield sample(
        "layer_norm, weighted", lambda x, w, b: functional.layer_norm(x, (4,), w, b), *("a b 4", "4", "4"), exact=False
    )
    yield sample("layer_norm of two", lambda x: functional.layer_norm(x, tuple(x.shape[1:])), "a b 4", exact=False)
    yield sample("rms_norm", lambda x, w: functional.rms_norm(x, (4,), w), "a b 4", "4", exact=False)
    yield sample("group_norm", lambda x: functional.group_norm(x, 2), "a 4 b", exact=False)
    yield sample("group_norm, weighted", lambda x, w: functional.group_norm(x, 2, w), "a 4 b", "4", exact=False)
    yield sample("instance_norm", lambda x: functional.instance_norm(x), "a b 4", exact=False)
    yield sample(
        "batch_norm", lambda x: functional.batch_norm(x, None, None, training=True), "a 4 b distinct", exact=False
    )
    running = sample("batch_norm, running", _running_batch_norm, "a 4 b distinct", "4", "4 positive", exact=False)
    yield replace(running, writes=True)
    evaluated = lambda x, mean, var: functional.batch_norm(x, mean, var, training=False)  # noqa: E731
    # Channels for each rank: torch 2.12 dies without, see findings/batch_norm_of_rank_without_channels.py.
    yield sample("batch_norm, evaluated", evaluated, "a 6 b", "6", "6 positive", exact=False)
    yield sample("normalize", functional.normalize, "a b", exact=False)
    yield sample("normalize of dim 0", partial(functional.normalize, dim=0), "a b", exact=False)
    yield sample("local_response_norm", lambda x: functional.local_response_norm(x, 2), "a 4 b", exact=False)
    # Not here: scaled_dot_product_attention, for which torch 2.13 takes twenty seconds on the CPU, see
    # findings/attention_placements_take_long.py.


def _running_batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return the normalised batch; the running mean and variance, detached, are changed in place."""
    return functional.batch_norm(x, mean.detach(), var.detach(), training=True)


_LOG = ("a b", "a b distribution")
_LOSSES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    # No two numbers are equal, where the gradient of l1_loss jumps.
    **{name: (name, {}, ("a b", "a b unit")) for name in ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss")},
    "mse_loss of three dims": ("mse_loss", {}, ("a b 3", "a b 3")),
    **{name: (name, {}, ("a b", "a b signs")) for name in ("soft_margin_loss", "hinge_embedding_loss")},
    "binary_cross_entropy": ("binary_cross_entropy", {}, ("a b unit", "a b unit")),
    "binary_cross_entropy, weighted": ("binary_cross_entropy", {}, ("a b unit", "a b unit", "a b positive")),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", {}, ("a b", "a b unit")),
    "kl_div": ("kl_div", {}, _LOG),
    "kl_div of logarithms": ("kl_div", {"log_target": True}, ("a b", "a b")),
    "poisson_nll_loss": ("poisson_nll_loss", {}, ("a b", "a b positive")),
    **{
        f"{name}{text}": (name, options, ("a 4", "a labels"))
        for name in ("cross_entropy", "nll_loss")
        for text, options in {"": {}, ", ignored": {"ignore_index": 1}}.items()
    },
    "cross_entropy, smoothed": ("cross_entropy", {"label_smoothing": 0.25}, ("a 4", "a labels")),
    **{f"{name}, weighted": (name, {}, ("a 4", "a labels", "4 positive")) for name in ("cross_entropy", "nll_loss")},
    **{f"{name} of sequences": (name, {}, ("a 4 b", "a b labels")) for name in ("cross_entropy", "nll_loss")},
    "cross_entropy of probabilities": ("cross_entropy", {}, ("a b", "a b distribution")),
    "multi_margin_loss": ("multi_margin_loss", {}, ("a 4", "a labels")),
    "multilabel_margin_loss": ("multilabel_margin_loss", {}, ("a 4", "a 4 labels")),
    "multilabel_soft_margin_loss": ("multilabel_soft_margin_loss", {}, ("a b", "a b unit")),
    "gaussian_nll_loss": ("gaussian_nll_loss", {}, ("a b", "a b", "a b positive")),
    "margin_ranking_loss": ("margin_ranking_loss", {}, ("a", "a", "a signs")),
    "cosine_embedding_loss": ("cosine_embedding_loss", {}, ("a b positive", "a b positive", "a signs")),
    "triplet_margin_loss": ("triplet_margin_loss", {}, ("a b", "a b", "a b")),
}
"""Function, options and arguments of a loss, by name; a third argument of the losses of two is their weight."""


def losses() -> Iterator[Sample]:
    """Yield a sample of each loss for each reduction and option."""
    for reduction in ("mean", "sum", "none"):
        for name, (function, options, arguments) in _LOSSES.items():
            call = partial(getattr(functional, function), reduction=reduction, **options)
            yield sample(f"{name}, {reduction}", call, *arguments, exact=False)
        yield sample(
            f"binary_cross_entropy_with_logits, pos_weight, {reduction}",
            lambda x, y, w, reduction=reduction: functional.binary_cross_entropy_with_logits(
                x, y, pos_weight=w, reduction=reduction
            ),
            *("a b", "a b unit", "b positive"),
            exact=False,
        )
        yield sample(f"ctc_loss, {reduction}", partial(_ctc, reduction=reduction), "4 a b", exact=False)
    yield sample("kl_div, batchmean", partial(functional.kl_div, reduction="batchmean"), *_LOG, exact=False)
    yield sample(
        "mse_loss of rows", lambda x, y: functional.mse_loss(x, y, reduction="none").mean(1), "a b", "a b", exact=False
    )
    yield sample("sum of squares over count", lambda x, y: ((x - y) ** 2).sum() / x.numel(), "a b", "a b", exact=False)


def _ctc(x: Tensor, *, reduction: str) -> Tensor:
    """Return the loss of sequences of four steps whose only label is 1."""
    count = x.size(1)
    targets, steps, labels = indices(x, *[1] * count).view(-1, 1), indices(x, *[4] * count), indices(x, *[1] * count)
    return functional.ctc_loss(x.log_softmax(-1), targets, steps, labels, reduction=reduction)
