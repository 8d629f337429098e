"""Samples of operators: calls with arguments of known numbers, of any of three sizes of shards.

A dimension of a sample is a number, or one of two letters that stand for a size that shards can divide evenly or not,
see `sizes`. Data are integers where the operator computes them exactly, in any order of sums, or else fp64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Domain = Literal[
    "integers",
    "positive",
    "unit",
    "distinct",
    "ascending",
    "bool",
    "rows",
    "signs",
    "distribution",
    "labels",
    "places",
    "definite",
]
"""Numbers of an argument.

`integers`: -4 to 4. `positive`: 1 to 4. `unit`: eighths between 0 and 1. `distinct`: no two are equal.
`ascending`: distinct ones in their order, for one dimension. `rows`: integers from 0 to 2, which index any dimension of
three. `signs`: -1 and 1. `distribution`: positive, and sums over the last dimension are 1. `labels`: integers from 0 to
3. `places`: 0 to 2 in another order, by which rows are written once. `definite`: symmetric matrices of the last two
dimensions, whose diagonal is at least twice the sum of their rows."""
Size = Literal["even", "uneven", "empty"]
"""Shards of the dimensions that have letters: equal, of different sizes, or not for every rank."""


def sizes(shards: int) -> dict[Size, dict[str, int]]:
    """Return the size of a dimension by its letter, for so many shards."""
    return {
        "even": {"a": 2 * shards, "b": 2 * shards},
        "uneven": {"a": 2 * shards - 1, "b": 2 * shards + 1},
        "empty": {"a": max(1, shards - 1), "b": shards + 1 if shards > 2 else 1},
    }


@dataclass(frozen=True)
class Argument:
    """Tensor that an operator is given."""

    shape: tuple[int | str, ...]
    domain: Domain = "integers"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def is_differentiable(self) -> bool:
        """True if the tensor is of floating-point numbers, which have gradients."""
        return self.domain not in ("bool", "rows", "labels", "places")

    def numbers(self, letters: dict[str, int], *, seed: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor; `dtype` is that of floating-point numbers."""
        shape = tuple(letters[size] if isinstance(size, str) else size for size in self.shape)
        generator = torch.Generator().manual_seed(seed)

        def sampled(low: int, high: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        match self.domain:
            case "bool":
                return sampled(0, 2).bool()
            case "rows":
                return sampled(0, 3)
            case "labels":
                return sampled(0, 4)
            case "places":
                return torch.randperm(3, generator=generator).reshape(shape)
            case "distinct":
                count = torch.Size(shape).numel()
                return (torch.randperm(count, generator=generator) - count // 2).reshape(shape).to(dtype)
            case "ascending":
                return (torch.arange(*shape) - shape[0] // 2).to(dtype)
            case "definite":
                numbers = sampled(-4, 5)
                return (numbers + numbers.mT + 32 * torch.eye(shape[-1], dtype=torch.int64)).to(dtype)
            case "positive":
                return sampled(1, 5).to(dtype)
            case "unit":
                return sampled(1, 8).to(dtype) / 8
            case "signs":
                return (2 * sampled(0, 2) - 1).to(dtype)
            case "distribution":
                positive = sampled(1, 5).to(dtype)
                return positive / positive.sum(-1, keepdim=True)
        return sampled(-4, 5).to(dtype)


@dataclass(frozen=True)
class Sample:
    """Call of an operator."""

    name: str
    """Operator, with the options that distinguish samples of the same operator."""
    call: Callable[..., Any]
    """Function of the arguments; it may change them."""
    arguments: tuple[Argument, ...]
    exact: bool = True
    """True if result and gradients are the same in every bit in any order of sums."""
    elementwise: bool = False
    """True if each element of the result depends on the same element of the arguments alone."""
    writes: bool = False
    """True if the call changes an argument."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of floating-point arguments: fp64 where results round, so that no rounding hides a fault."""
        return torch.float32 if self.exact else torch.float64


def sample(
    name: str, call: Callable[..., Any], *arguments: Argument | tuple[int | str, ...] | str, exact: bool = True
) -> Sample:
    """Return a sample; an argument may be written as its shape, or as `"a b"` or `"a 3 positive"`."""
    return Sample(name, call, tuple(map(_argument, arguments)), exact)


def indices(like: Tensor, *values: int) -> Tensor:
    """Return a plain tensor of int64 numbers on the device of another tensor."""
    return torch.tensor(values, device=like.device)


def operators(owner: Any, names: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the operators of these names."""
    for name in names.split():
        yield name, getattr(owner, name)


def _argument(text: Argument | tuple[int | str, ...] | str) -> Argument:
    if isinstance(text, Argument):
        return text
    words = text.split() if isinstance(text, str) else [*map(str, text)]
    shape = tuple(int(word) if word.isdigit() else word for word in words if word.isdigit() or len(word) == 1)
    domains = [word for word in words if not word.isdigit() and len(word) > 1]
    return Argument(shape, *domains)  # type: ignore[arg-type]
