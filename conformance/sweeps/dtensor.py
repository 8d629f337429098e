"""DTensor compared with a plain tensor: redistribution from any layout to any other, and operators.

Numbers are small integers, so that sums are exact in any order; some dimensions can be sharded evenly and some cannot.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import product

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.flattened_mesh import flattened
from conformance.run.experiment import Needs
from conformance.sweeps.drawing import share_on
from conformance.sweeps.layouts import (
    Layout,
    difference,
    distributed,
    integers,
    is_cut,
    shard_of,
    spelled,
    strided_rows,
)
from conformance.sweeps.strided_weights import try_weights
from conformance.sweeps.trials import End, Swept, Trials

_TENSORS = (((8, 4), torch.float32), ((5, 3), torch.float32), ((1, 7), torch.float16), ((2, 3, 5), torch.bfloat16))
"""Shapes and dtypes of tensors to redistribute."""
_LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2))
_SHAPES = {"even rows": (8, 8), "uneven rows": (5, 3)}
"""Shapes of tensors to redistribute on two dimensions of a mesh."""
_TO_MERGE: tuple[Layout, ...] = (
    (Shard(0), Shard(0)),
    (Shard(1), Shard(1)),
    (Partial(), Partial()),
    (Partial("avg"), Partial("avg")),
    (Partial("avg"), Partial()),
    (Shard(0), Shard(1)),
)
_PAIRS_TO_MERGE = [
    (source, target)
    for source, target in product(_TO_MERGE, ((Replicate(), Replicate()), *_TO_MERGE))
    if source != target and Partial() not in target and Partial("avg") not in target
]
"""Pairs of layouts whose redistribution may be one collective over both dimensions, and others beside them."""


class Redistribution(msgspec.Struct):
    """Numbers of redistributions on one rank, and of their wrong elements."""

    tried: int = 0
    """Number of pairs of layouts."""
    local: int = 0
    """Number of wrong elements of this rank's shard."""
    full: int = 0
    """Number of wrong elements of the full tensor."""
    gradient: int = 0
    """Number of wrong elements of the gradient of the tensor that was redistributed."""


class OperatorOutcome(msgspec.Struct):
    """Outcome of one operator on one rank, over all layouts of its arguments."""

    computed: int = 0
    """Number of layouts for which the operator has computed."""
    refused: int = 0
    """Number of layouts for which the operator has raised an error."""
    wrong: int = 0
    """Number of wrong elements of results and gradients."""


@experiment(needs=Needs.NOTHING)
def redistribute(rank: RankWorld) -> Redistribution:
    """Redistribute from every layout, partial sums included, to every other layout.

    Eight ranks have a mesh of three dimensions. It has no names, nor has a mesh of replicas: torch merges nothing then.
    On a mesh of two or three dimensions, where layouts are many, one tensor has to do, which cannot be sharded evenly.
    """
    mesh = _mesh_without_names(rank) if rank.size == 8 or rank.dims.dp_replicate > 1 else rank.mesh
    outcome = Redistribution()
    for shape, dtype in _TENSORS if mesh.ndim == 1 else _TENSORS[1:2]:
        plain, weights = (_numbers(mesh, shape, seed=seed).to(dtype) for seed in (0, 1))
        for source, target in _pairs_of_layouts(mesh, len(shape)):
            given = distributed(plain, mesh, source)
            given.requires_grad_()
            result = given.redistribute(placements=target)
            torch.autograd.backward((result * distributed(weights, mesh, target)).sum())
            assert isinstance(given.grad, DTensor)
            outcome.tried += 1
            outcome.local += _wrong(result.to_local(), shard_of(plain, mesh, target))
            outcome.full += _wrong(result.full_tensor(), plain)
            outcome.gradient += _wrong(given.grad.full_tensor(), weights)
    return outcome


def _mesh_without_names(rank: RankWorld) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (2, 2, 2) if rank.size == 8 else tuple(rank.mesh.shape))


def _pairs_of_layouts(mesh: DeviceMesh, tensor_dims: int) -> Iterator[tuple[Layout, Layout]]:
    """Yield all pairs of layouts; on a mesh of three dimensions a third, in which any five of six placements meet."""
    placements = _LAYOUTS[: 1 + tensor_dims]
    for source, target in product(_layouts(mesh, (*placements, Partial())), _layouts(mesh, placements)):
        indices = [(*placements, Partial()).index(placement) for placement in (*source, *target)]
        if mesh.ndim < 3 or sum(indices) % len(placements) == 0:
            yield source, target


@experiment(needs=Needs.SHARDING, takes_share=True)
def redistribute_weights(rank: RankWorld) -> Swept:
    """Redistribute from and to layouts with strided shards, and over dimensions that are flattened into one.

    FSDP makes strided shards of rows of tensor parallelism: on a mesh of data parallelism over tensor parallelism. Full
    tensors and gradients are asked for only where all ranks have the right shards: ranks with shards of other shapes
    send what no rank expects, upon which gloo ends a process. Then operators on such weights, see `strided_weights`.
    """
    trials = Trials(rank.mesh)
    strided = [*_pairs_of_strided_layouts(trials.mesh, strided_rows(rank.mesh)[0])]
    samples = [(kind, *pair) for pairs in (strided, _PAIRS_TO_MERGE) for kind in _SHAPES for pair in pairs]
    for kind, source, target in share_on(rank, samples, _kinds):
        shape, is_merged = _SHAPES[kind], (source, target) in _PAIRS_TO_MERGE
        plain, weights = (_numbers(trials.mesh, shape, seed=seed) for seed in (0, 1))
        subject, case = f"{spelled(source)} to {spelled(target)}", f"{shape}"
        kind += ", flattened" if is_merged else ""
        call = partial(_redistributed_shards, plain, source, target, is_merged)
        is_right = trials.attempt(subject, kind, case, call, may_refuse=False) is End.RIGHT
        if is_right and Partial("avg") not in source:
            call = partial(_redistributed_gradients, plain, weights, source, target)
            trials.attempt(subject, kind, case, call, may_refuse=False)
    try_weights(rank, trials)
    return trials.swept


def _kinds(sample: tuple[str, Layout, Layout]) -> list[Hashable]:
    """Return the kinds of a redistribution, of each of which a share has one: its shape, and a source to merge."""
    kind, *pair = sample
    return [kind, *pair[:1]] if tuple(pair) in _PAIRS_TO_MERGE else [kind]


def _pairs_of_strided_layouts(mesh: DeviceMesh, strided: Placement) -> Iterator[tuple[Layout, Layout]]:
    placements = _LAYOUTS[:3]
    ours = [(strided, at) for at in placements]
    for source, target in product(
        [*_layouts(mesh, (*placements, Partial())), *ours], [*_layouts(mesh, placements), *ours]
    ):
        if source != target and (source in ours or target in ours):
            yield source, target


def _redistributed_shards(
    plain: Tensor, source: Layout, target: Layout, is_merged: bool, mesh: DeviceMesh
) -> dict[str, str]:
    if is_merged:
        flattened(mesh)
    result = distributed(plain, mesh, source).redistribute(placements=target)
    text = difference(result.to_local(), shard_of(plain, mesh, target), bound=0.0)
    return {"shard": text} if text else {}


def _redistributed_gradients(
    plain: Tensor, weights: Tensor, source: Layout, target: Layout, mesh: DeviceMesh
) -> dict[str, str]:
    given = distributed(plain, mesh, source)
    given.requires_grad_()
    result = given.redistribute(placements=target)
    if text := difference(result.full_tensor(), plain, bound=0.0):
        return {"full tensor": text}
    torch.autograd.backward((result * distributed(weights, mesh, target)).sum())
    assert isinstance(given.grad, DTensor)
    text = difference(given.grad.to_local(), shard_of(weights, mesh, given.grad.placements), bound=0.0)
    return {"gradient": text} if text else {}


@experiment(needs=Needs.NOTHING)
def operate(rank: RankWorld) -> dict[str, OperatorOutcome]:
    """Apply operators to all layouts of their arguments; returns outcomes by name of the operator."""
    return {name: _applied(rank.mesh, operator, shapes) for name, (operator, shapes) in _OPERATORS.items()}


def _applied(mesh: DeviceMesh, operator: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]) -> OperatorOutcome:
    plain = [_numbers(mesh, shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    expected = operator(*plain)
    torch.autograd.backward(expected.sum())
    outcome = OperatorOutcome()
    for layouts in _argument_layouts(mesh, shapes):
        given = [distributed(x.detach(), mesh, at).requires_grad_() for x, at in zip(plain, layouts, strict=True)]
        try:
            result = operator(*given)
        except (RuntimeError, NotImplementedError):
            outcome.refused += 1
            continue
        assert isinstance(result, DTensor)
        outcome.computed += 1
        outcome.wrong += _wrong_here(result, expected)
        torch.autograd.backward(result.sum())
        for x, argument in zip(plain, given, strict=True):
            assert isinstance(argument.grad, DTensor)
            assert x.grad is not None
            outcome.wrong += _wrong_here(argument.grad, x.grad)
    return outcome


def _argument_layouts(mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> Iterator[Sequence[Layout]]:
    """Yield layouts of all arguments: all combinations of up to three placements, of four a third.

    Where the indices of four placements add up to a multiple of three, any placements of three of them meet (an
    orthogonal array of strength three, Bush 1952).
    """
    for layouts in product(*([*_layouts(mesh, _LAYOUTS[: 1 + len(shape)])] for shape in shapes)):
        indices = [_LAYOUTS.index(placement) for layout in layouts for placement in layout]
        if len(indices) <= 3 or sum(indices) % len(_LAYOUTS) == 0:
            yield layouts


_OPERATORS: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "mm": (torch.mm, ((6, 4), (4, 5))),
    "linear": (F.linear, ((5, 4), (6, 4))),
    "add of a row": (torch.add, ((5, 3), (3,))),
    "mul": (torch.mul, ((5, 3), (5, 3))),
    "sum": (torch.sum, ((5, 3),)),
    "sum of dim 0": (lambda x: x.sum(0), ((5, 3),)),
    "mean of dim 1": (lambda x: x.mean(1, keepdim=True), ((5, 4),)),
    "relu": (torch.relu, ((5, 3),)),
    "square": (torch.square, ((5, 3),)),
    "t": (lambda x: x.t(), ((5, 3),)),
    "cat of dim 1": (lambda x, y: torch.cat([x, y], 1), ((4, 2), (4, 2))),
    "view": (lambda x: x.view(4, 2, 4), ((4, 8),)),
    "slice": (lambda x: x[1:3], ((5, 3),)),
}
"""Operator and shapes of its arguments by name."""


def _layouts(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[Layout]:
    return product(placements, repeat=mesh.ndim)


def _numbers(mesh: DeviceMesh, shape: tuple[int, ...], *, seed: int) -> Tensor:
    return integers(*shape, low=-4, high=4, seed=seed).to(mesh.device_type)


def _wrong_here(measured: DTensor, expected: Tensor) -> int:
    """Return the number of wrong elements on this rank: of its shard, which spares a collective, or else of the sum."""
    if is_cut(measured, expected):
        return _wrong(measured.to_local(), shard_of(expected, measured.device_mesh, measured.placements))
    return _wrong(measured.full_tensor(), expected)


def _wrong(measured: Tensor, expected: Tensor) -> int:
    """Return the number of elements that differ; all elements count if the shapes differ."""
    if measured.shape != expected.shape:
        return max(measured.numel(), expected.numel(), 1)
    return int((measured.detach() != expected.detach()).sum())
