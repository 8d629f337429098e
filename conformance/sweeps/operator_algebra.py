"""Samples of batched linear algebra, transforms, complex views and operators on lists, as optimizers use them.

Matrices are symmetric with a dominant diagonal, so that no operator enlarges errors, see `operator_sweep`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.sweeps.operator_samples import Sample, sample

_MATRICES = "a 3 3 definite"


def algebra() -> Iterator[Sample]:
    """Yield the samples; torch has all operators from 2.11 on."""
    matrix_functions: dict[str, Callable[[Tensor], Any]] = {
        "cholesky": torch.linalg.cholesky,
        "inv": torch.linalg.inv,
        "pinv": torch.linalg.pinv,
        "det": torch.linalg.det,
        "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
        "matrix_exp": lambda x: torch.matrix_exp(x / 64),
        "lu": lambda x: torch.linalg.lu(x).U,
        "lu_factor": lambda x: torch.linalg.lu_factor(x).LU,
        "ldl_factor": lambda x: torch.linalg.ldl_factor(x).LD.detach(),
        "cholesky_inverse": lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x)),
        "eigvalsh": torch.linalg.eigvalsh,
        "svdvals": torch.linalg.svdvals,
        "qr": lambda x: torch.linalg.qr(x).R,
        "matrix_power": lambda x: torch.linalg.matrix_power(x, 2) / 64,
    }
    for name, call in matrix_functions.items():
        yield sample(name, call, _MATRICES, exact=False)
    yield sample("solve", torch.linalg.solve, _MATRICES, "a 3 b", exact=False)
    yield sample("ldl_solve", _ldl_solved, _MATRICES, "a 3 b", exact=False)
    yield sample("ormqr", lambda x, y: torch.ormqr(*torch.geqrf(x), y), _MATRICES, "a 3 b", exact=False)
    yield sample(
        "cholesky_solve",
        lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(x)),
        _MATRICES,
        "a 3 b",
        exact=False,
    )
    triangular = lambda x, y: torch.linalg.solve_triangular(x, y, upper=True)  # noqa: E731
    yield sample("solve_triangular", triangular, _MATRICES, "a 3 b", exact=False)
    yield sample("multi_dot", lambda x, y, z: torch.linalg.multi_dot([x, y, z]), "a 3", "3 4", "4 b")
    for name, transform in (("fft", torch.fft.fft), ("rfft", torch.fft.rfft)):
        yield sample(name, lambda x, transform=transform: torch.view_as_real(transform(x)), "a b 4", exact=False)
    yield sample("fft2", lambda x: torch.view_as_real(torch.fft.fft2(x)), "a b 4", exact=False)
    yield sample("view_as_complex", lambda x: torch.view_as_complex(x).abs(), "a b 2 positive", exact=False)
    yield sample("rotary product", _rotated, "a b 2", "b 2", exact=False)
    yield sample("sort, stable", lambda x: torch.sort(x, dim=0, stable=True), "a b distinct")
    yield sample("bucketize", torch.bucketize, "a b", "3 ascending")
    yield sample("index_reduce", lambda x, i, y: x.index_reduce(0, i, y, "amax"), "3 b", "a rows", "a b distinct")
    yield sample("index_fill by a tensor", lambda x, i, y: x.index_fill(0, i, y.sum()), "3 b", "2 rows", "1")
    yield sample("atleast_3d", torch.atleast_3d, "a b")
    yield sample("atleast_3d of a vector", torch.atleast_3d, "a")
    yield sample("swapaxes", lambda x: x.swapaxes(0, -1), "a b 4")
    yield sample("movedim of two", lambda x: torch.movedim(x, (0, 1), (1, 2)), "a b 4")
    yield sample(
        "grid_sample", partial(functional.grid_sample, align_corners=True), "a 2 4 4", "a 3 3 2 unit", exact=False
    )
    yield sample("unfold of images", lambda x: functional.unfold(x, 2), "a 2 4 4")
    yield from _lists()


def _rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """Return pairs of numbers as products with complex numbers, as rotary embeddings do."""
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(frequencies))


def _ldl_solved(x: Tensor, y: Tensor) -> Tensor:
    """Solve equations by the factors of a symmetric matrix."""
    factors = torch.linalg.ldl_factor(x.detach())
    solved: Tensor = torch.linalg.ldl_solve(factors.LD, factors.pivots, y.detach())
    return solved


def _lists() -> Iterator[Sample]:
    """Yield norms of gradients as clipping computes them, of lists of tensors at once or one by one."""
    for order in (1.0, 2.0, float("inf")):
        for foreach in (True, False):
            norm = partial(_total_norm, order=order, foreach=foreach)
            yield sample(f"total norm {order}{', foreach' if foreach else ''}", norm, "a b", "b 3", exact=False)


def _total_norm(*tensors: Tensor, order: float, foreach: bool) -> Tensor:
    return torch.nn.utils.get_total_norm([x.detach() for x in tensors], order, foreach=foreach)
