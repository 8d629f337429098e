"""Samples of operators that write: in place, through views, by index, and into a tensor that is given as `out`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.sweeps.operator_samples import Sample, indices, operators, sample


def writes() -> Iterator[Sample]:
    """Yield a sample of each operator in place, and of each view that is written to."""
    yield from (replace(each, writes=True) for each in (*_samples(), *_outputs()))


def _samples() -> Iterator[Sample]:
    for name, call in _IN_PLACE.items():
        yield sample(name, call, "a b")
    for name, (call, other) in _IN_PLACE_BY_ANOTHER.items():
        yield sample(name, call, "a b", other, exact=name not in _ROUNDED)
    for name, call in _OF_ROWS.items():
        yield sample(name, call, "3 b", "a rows", "a b")
    for view_name, view in _VIEWS.items():
        yield sample(f"{view_name} zeroed", _changed(lambda x, view=view: view(x).zero_()), "a b 4")
        yield sample(f"{view_name} increased", _changed(lambda x, view=view: view(x).add_(1)), "a b 4")
    yield sample("slice assigned", _assigned(slice(0, 1)), "a b", "1 b")
    yield sample("row assigned", _assigned(-1), "a b", "b")
    yield sample("columns assigned", _assigned((slice(None), slice(0, 1))), "a b", "a 1")
    yield sample("number assigned to a slice", lambda x: x.__setitem__(slice(0, 2), 9.0), "a b")
    yield sample("number assigned to columns", lambda x: x.__setitem__((..., slice(0, 2)), 9.0), "a b")
    yield sample("all assigned", _assigned(slice(None)), "a b", "a b")
    yield sample("assigned by a mask", lambda x, mask: x.__setitem__(mask, 9.0), "a b", "a b bool")
    yield sample("rows assigned by a mask", lambda x, mask: x.__setitem__(mask, 9.0), "a b", "a bool")
    yield sample("rows assigned by index", lambda x, i: x.__setitem__(i, 9.0), "3 b", "2 rows")
    yield sample("columns assigned by index", lambda x, i: x.__setitem__((slice(None), i), 9.0), "a 3", "2 rows")
    yield sample("rows assigned by places", lambda x, i, y: x.__setitem__(i, y), "3 b", "3 places", "3 b")
    yield sample("columns assigned by places", _to_columns, "a 3", "3 places", "a 3")
    yield sample("elements assigned by places", _to_elements, "3 3", "3 places", "3 rows", "3")
    yield sample("added to a view", _added_and_returned, "a b", "b", exact=True)


def _outputs() -> Iterator[Sample]:
    """Yield a sample of each form that writes its result into a tensor that is given as `out`."""
    for name, operator in operators(torch, "add sub mul maximum eq"):
        domain = "bool" if name == "eq" else ""
        yield sample(f"{name}, out", _into(operator), f"a b {domain}", "a b", "a b")
    for name, operator in operators(torch, "neg abs sign"):
        yield sample(f"{name}, out", _into(operator), "a b", "a b")
    yield sample("add times 2, out", _into(partial(torch.add, alpha=2)), "a b", "a b", "a b")
    yield sample("exp, out", _into(torch.exp), "a b", "a b", exact=False)
    yield sample("mm, out", _into(torch.mm), "a b", "a 3", "3 b")
    yield sample("sum of dim 0, out", _into(partial(torch.sum, dim=0)), "b", "a b")
    yield sample("cat, out", _into(lambda *x, out: torch.cat(x, 1, out=out)), "a 6", "a 2", "a 4")
    yield sample("cumsum, out", _into(partial(torch.cumsum, dim=0)), "a b", "a b")


def _into(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call whose result is written into its first argument; torch refuses gradients of it."""

    def call(out: Tensor, *arguments: Tensor) -> Tensor:
        given: Tensor = operator(*(x.detach() for x in arguments), out=out.detach())
        return given

    return call


def _changed(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that changes its first argument and returns it, so that it has a gradient."""

    def call(x: Tensor, *others: Tensor) -> Tensor:
        change(x, *others)
        return x

    return call


_IN_PLACE: dict[str, Callable[..., Any]] = {
    name: _changed(change)
    for name, change in {
        "zero_": lambda x: x.zero_(),
        "fill_": lambda x: x.fill_(3.0),
        "add_ a number": lambda x: x.add_(1),
        "sub_ a number": lambda x: x.sub_(1),
        "mul_ a number": lambda x: x.mul_(2),
        "div_ a number": lambda x: x.div_(2),
        "neg_": lambda x: x.neg_(),
        "square_": lambda x: x.square_(),
        "clamp_": lambda x: x.clamp_(-1, 1),
        "relu_": lambda x: x.relu_(),
        "abs_": lambda x: x.abs_(),
        "sign_": lambda x: x.sign_(),
        "tril_": lambda x: x.tril_(),
        "triu_": lambda x: x.triu_(),
        "masked_fill_ by itself": lambda x: x.masked_fill_(x.detach() > 0, 9.0),
        "fill_diagonal_": lambda x: x.fill_diagonal_(9.0),
        "cumsum_": lambda x: x.cumsum_(0),
        "index_fill_": lambda x: x.index_fill_(0, indices(x, 0), 9.0),
        "t_": lambda x: x.t_(),
        "unsqueeze_": lambda x: x.unsqueeze_(0),
    }.items()
} | {
    "nn.init.zeros_": lambda x: nn.init.zeros_(x.detach()),
    "nn.init.constant_": lambda x: nn.init.constant_(x.detach(), 5.0),
    "nn.init.eye_": lambda x: nn.init.eye_(x.detach()),
    "nn.init.dirac_": lambda x: nn.init.dirac_(x.detach().unsqueeze(-1)),
}

_IN_PLACE_BY_ANOTHER: dict[str, tuple[Callable[..., Any], str]] = {
    "add_": (_changed(lambda x, y: x.add_(y)), "a b"),
    "add_ times 2": (_changed(lambda x, y: x.add_(y, alpha=2)), "a b"),
    "add_ a row": (_changed(lambda x, y: x.add_(y)), "b"),
    "sub_": (_changed(lambda x, y: x.sub_(y)), "a b"),
    "mul_": (_changed(lambda x, y: x.mul_(y)), "a b"),
    "mul_ by a row": (_changed(lambda x, y: x.mul_(y)), "b"),
    "copy_": (_changed(lambda x, y: x.copy_(y)), "a b"),
    "copy_ a row": (_changed(lambda x, y: x.copy_(y)), "b"),
    "lerp_": (_changed(lambda x, y: x.lerp_(y, 0.5)), "a b"),
    "addcmul_": (_changed(lambda x, y: x.addcmul_(y, y, value=2)), "a b"),
    "maximum out": (lambda x, y: torch.maximum(x.detach(), y, out=x.detach()), "a b"),
    "masked_fill_": (_changed(lambda x, mask: x.masked_fill_(mask, 9.0)), "a b bool"),
    "masked_fill_ rows": (_changed(lambda x, mask: x.masked_fill_(mask, 9.0)), "a 1 bool"),
    "eq_": (_changed(lambda x, y: x.detach().eq_(y.detach())), "a b"),
    "div_": (_changed(lambda x, y: x.div_(y)), "a b positive"),
    "addcdiv_": (_changed(lambda x, y: x.addcdiv_(y, y)), "a b signs"),
    "atan2_": (_changed(lambda x, y: x.atan2_(y)), "a b positive"),
    "masked_scatter_": (_changed(lambda x, y: x.masked_scatter_(x.detach() > 0, y)), "a b"),
    "set_ data": (lambda x, y: x.detach().copy_(y.detach()), "a b"),
}

_ROUNDED = ("atan2_",)
"""Operators that round an element by another kernel where it fills no vector, as with AVX2."""

_OF_ROWS: dict[str, Callable[..., Any]] = {
    "index_add_": _changed(lambda x, i, y: x.index_add_(0, i, y)),
    "scatter_": _changed(lambda x, i, y: x.scatter_(0, i[:1].unsqueeze(-1).expand(-1, y.size(-1)), y[:1])),
    "index_put_": _changed(lambda x, i, y: x.index_put_((i,), y, accumulate=True)),
    "scatter_add_": _changed(lambda x, i, y: x.scatter_add_(0, i.unsqueeze(-1).expand(-1, y.size(-1)), y)),
}

_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[0:2],
    "slice with a step": lambda x: x[::2],
    "first row": lambda x: x[0],
    "last column": lambda x: x[..., -1],
    "columns": lambda x: x[:, 0:2],
    "narrow": lambda x: x.narrow(1, 0, 1),
    "select": lambda x: x.select(2, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "transposed row": lambda x: x.transpose(0, 1)[0],
    "view": lambda x: x.view(x.size(0), -1),
    "flat view": lambda x: x.view(-1),
    "reshaped row": lambda x: x.view(-1, x.size(-1))[0],
    "diagonal": lambda x: x.diagonal(),
    "first of split": lambda x: torch.split(x, 1)[0],
    "first of chunks": lambda x: x.chunk(2)[0],
    "last of unbind": lambda x: x.unbind(0)[-1],
    "unsqueezed": lambda x: x.unsqueeze(0),
    "detached": lambda x: x.detach(),
    "expanded row": lambda x: x[:1].squeeze(0),
    "permuted": lambda x: x.permute(2, 0, 1),
    "flattened": lambda x: x.flatten(1),
    "regrouped view": lambda x: x.view(2 * x.size(0), -1),
}


def _assigned(where: Any) -> Callable[..., Any]:
    return _changed(lambda x, value: x.__setitem__(where, value))


def _to_columns(x: Tensor, columns: Tensor, values: Tensor) -> None:
    """Assign columns by their indices."""
    x[:, columns] = values


def _to_elements(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Assign elements by the indices of their rows and columns."""
    x[rows, columns] = values


def _added_and_returned(x: Tensor, row: Tensor) -> Tensor:
    """Add a row to a view of the product of x with 2, which has a gradient."""
    doubled = x * 2
    doubled[0].add_(row)
    return doubled
