"""Sweep of operators over layouts of their arguments: right, refused or wrong, compared with full tensors.

Each sample of `operator_table` is called with DTensors in many layouts. Its result, the gradients of all arguments and
its changes in place must be those of full tensors. Faults are `result`, `gradient`, `argument` (contents of arguments
after the call), `type` (another dtype, shape or number of results) and `full tensors` (an error on these). On two ranks
a call is then repeated to see whether it communicates.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.layouts import Layout, difference, distributed, spelled, strided_rows, varied, without_pending
from conformance.sweeps.operator_samples import Argument, Sample, Size, sizes
from conformance.sweeps.operator_table import samples
from conformance.sweeps.trials import End, Swept, Trials, select_samples

FORWARD, ANY_PASS = "forward", "any pass"
"""Passes in which calls communicate; the latter is forward or its backward."""
_ROUNDINGS = 2.0**14
"""Roundings of fp64 that results may differ by, relative to the largest expected number.

A sample adds at most 2**6 numbers, composes at most 2**4 operators whose kernels are right to within 4 roundings, and
stays away from singularities, so that none of them enlarges an error by more than 2**2. Faults change a tenth or more.
"""
_ROUNDINGS_OF_PENDING = 2.0**3
"""Roundings of fp32 that integers may differ by where ranks are no power of two.

A tensor becomes a pending sum by division by their number, and up to four ranks add rounded numbers.
"""


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Call every sample with the layouts of this mesh, see `plan_of`."""
    trials, communicating = Trials(rank.mesh), dict[str, dict[str, int]]()
    weight = strided_rows(rank.mesh) if "tp" in (rank.mesh.mesh_dim_names or ()) else None
    for sample in select_samples(samples(), lambda sample: sample.name, restricted_to=rank.subjects):
        trials.add(sample.name)
        every = [
            try_size(trials, sample, size, layouts) for size, layouts in plan_of(sample, rank.mesh, weight).items()
        ]
        if counts := Counter(name for passes in every for name in passes):
            communicating[sample.name] = dict(counts)
    return msgspec.structs.replace(trials.swept, communicating=communicating)


def try_size(trials: Trials, sample: Sample, size: Size, layouts: Sequence[tuple[Layout, ...]]) -> list[str]:
    """Call an operator with all layouts, up to a call that leaves ranks waiting; return the passes that communicate."""
    shards = max(trials.mesh.size(dim) for dim in range(trials.mesh.ndim))
    letters = sizes(shards)[size]
    full = [
        argument.numbers(letters, seed=index, dtype=sample.dtype) for index, argument in enumerate(sample.arguments)
    ]
    expected = trials.expected(sample.name, f"{size} shards", partial(_on_full_tensors, sample, full))
    if expected is None:
        return []
    passes = dict[str, list[str]]()
    for combination in layouts:
        case = " x ".join(map(spelled, combination))
        call = partial(_faults, sample, full, expected, combination, passes.setdefault(case, []))
        end = trials.attempt(sample.name, f"{size} shards", case, call)
        if end is None:
            break
        if end is End.WRONG and trials.mesh.size() == 2:  # a release that mends the call may communicate
            passes[case] = [FORWARD, ANY_PASS]
    return [name for names in passes.values() for name in names]


def _faults(
    sample: Sample,
    full: Sequence[Tensor],
    expected: "Outcome",
    layouts: Sequence[Layout],
    passes: list[str],
    mesh: DeviceMesh,
) -> dict[str, str]:
    """Return the faults that one call shows on this rank; `passes` are then those that communicate in the call."""
    given = [distributed(x, mesh, at) for x, at in zip(full, layouts, strict=True)]
    measured = _called(sample, given, differentiated=len(expected.gradients))
    faults = dict(_differences(measured, expected, roundings=_roundings(sample, mesh)))
    if mesh.size() == 2:  # where calls take least; other sizes may have other strategies
        passes[:] = _communicating_passes(sample, given, len(expected.gradients))
    return faults


def _communicating_passes(sample: Sample, given: Sequence[Tensor], differentiated: int) -> Iterator[str]:
    """Yield the passes in which a call on DTensors communicates."""
    forward = _collectives(sample, given, differentiated=0)
    if forward:
        yield FORWARD
    if forward or (differentiated and _collectives(sample, given, differentiated=differentiated)):
        yield ANY_PASS


def _collectives(sample: Sample, given: Sequence[Tensor], *, differentiated: int) -> int:
    """Return the number of collectives that a call on DTensors issues on this rank."""
    with CommDebugMode() as mode:  # type: ignore[no-untyped-call]
        _called(sample, given, differentiated=differentiated)
    return int(mode.get_total_counts())


def _roundings(sample: Sample, mesh: DeviceMesh) -> float:
    """Return the number of roundings that a result may differ by; 0 if it must be equal in every bit."""
    if not sample.exact:
        return _ROUNDINGS
    return 0.0 if mesh.size().bit_count() == 1 else _ROUNDINGS_OF_PENDING


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call: results, the arguments afterwards, and the gradients of the first arguments."""

    results: list[Any]
    arguments: list[Tensor]
    gradients: list[Tensor | None]


def _on_full_tensors(sample: Sample, full: Sequence[Tensor]) -> Outcome:
    """Return the outcome with the gradients of all arguments, or of the first or of none where torch refuses more."""
    for differentiated in (len(full), 1):
        with suppress(RuntimeError):
            return _called(sample, full, differentiated=differentiated)
    return _called(sample, full, differentiated=0)


def _called(sample: Sample, given: Sequence[Tensor], *, differentiated: int) -> Outcome:
    """Call an operator for its result and the gradients of the first arguments; one that writes once more without."""
    if sample.writes:
        arguments = [x.clone() for x in given]
        with torch.no_grad():
            results = _flat(sample.call(*arguments))
        return Outcome(results, arguments, _gradients(sample, given, differentiated)[1] if differentiated else [])
    results, gradients = _gradients(sample, given, differentiated)
    return Outcome(results, [], gradients)


def _gradients(sample: Sample, given: Sequence[Tensor], count: int) -> tuple[list[Any], list[Tensor | None]]:
    """Return results, and gradients of the first arguments."""
    leaves = [x.detach().requires_grad_(x.is_floating_point() and index < count) for index, x in enumerate(given)]
    # A leaf must not be changed in place.
    inner = [x * 1 if x.requires_grad else x.clone() for x in leaves] if sample.writes else leaves
    results = _flat(sample.call(*inner))
    outputs = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [_weights(x) for x in outputs])
    return results, [x.grad for x in leaves[:count]]


def _weights(output: Tensor) -> Tensor | None:
    """Return a gradient of an output that differs from element to element; None, that is 1, for a scalar."""
    if output.ndim == 0:
        return None
    if not isinstance(output, DTensor):
        return varied(output).to(output.device)
    return distributed(varied(output), output.device_mesh, without_pending(output.placements))


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [leaf for each in result for leaf in _flat(each)]
    return [result]


def _differences(measured: Outcome, expected: Outcome, *, roundings: float) -> Iterator[tuple[str, str]]:
    if len(measured.results) != len(expected.results):
        yield "type", f"{len(measured.results)} results, expected {len(expected.results)}"
        return
    kinds: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("result", measured.results, expected.results),
        ("gradient", measured.gradients, expected.gradients),
        ("argument", measured.arguments, expected.arguments),
    )
    for fault, sharded, full in kinds:
        differences = [_difference(m, e, roundings=roundings) for m, e in zip(sharded, full, strict=True)]
        different = [text for text in differences if text]
        if different:
            yield fault, different[0]


def _difference(measured: Any, expected: Any, *, roundings: float) -> str:
    """Return the difference of a result from the one on full tensors; empty if there is none."""
    if (expected is None or measured is None) and expected is not measured:
        present = expected if measured is None else measured
        return "" if isinstance(present, Tensor) and not _full(present).any() else f"{measured}, expected {expected}"
    if not isinstance(expected, Tensor) or not isinstance(measured, Tensor):
        return "" if type(measured) is type(expected) and measured == expected else f"{measured}, expected {expected}"
    bound = roundings * torch.finfo(expected.dtype).eps / 2 if expected.is_floating_point() else 0.0
    return difference(measured, expected, bound=bound)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Layouts


_PENDING = (Partial("sum"), Partial("max"))


def plan_of(sample: Sample, mesh: DeviceMesh, weight: Layout | None = None) -> dict[Size, list[tuple[Layout, ...]]]:
    """Return the layouts to try by size of shards; each world tries another share of them.

    Two ranks: the same shards of all arguments, uneven along the first dimension, and even along the first and the
    last, which adds nothing for an operator on elements. More ranks: uneven shards of one or all arguments, and shards
    that some ranks lack. A mesh of two dimensions: pairs of placements, the same for all arguments; or, with `weight`,
    that layout, which FSDP gives a weight of tensor parallelism.
    """
    arguments = sample.arguments
    first, last = _alike(arguments, Shard(0)), _alike(arguments, Shard(-1))
    if weight is not None:
        return {"even": _like_weights(arguments, weight)}
    if mesh.ndim == 2:
        return {"even": _on_two_dimensions(arguments)}
    if mesh.size() == 2:
        return {"uneven": _each([first]), "even": [] if sample.elementwise else _each([first, last])}
    return {"uneven": _one_or_all(arguments, pending=sample.elementwise), "empty": _each([first])}


def _each(layouts: Sequence[Sequence[Placement]]) -> list[tuple[Layout, ...]]:
    """Return layouts of a mesh of one dimension, each once."""
    return list(dict.fromkeys(tuple((at,) for at in combination) for combination in layouts))


def _alike(arguments: Sequence[Argument], at: Placement) -> tuple[Placement, ...]:
    return tuple(_possible(at, argument) for argument in arguments)


def _one_or_all(arguments: Sequence[Argument], *, pending: bool) -> list[tuple[Layout, ...]]:
    """Return layouts of arguments: all sharded in the same way, or one sharded or pending and the rest replicated.

    `pending` adds the layouts in which all arguments are pending.
    """
    replicated: tuple[Placement, ...] = (Replicate(),) * len(arguments)
    dims = [Shard(dim) for dim in range(-1, max(argument.ndim for argument in arguments))]
    chosen = [replicated, *(_alike(arguments, at) for at in (*dims, *(_PENDING if pending else ())))]
    for index, argument in enumerate(arguments):
        for at in (Shard(0), *(_PENDING if index == 0 else ())):
            chosen.append((*replicated[:index], _possible(at, argument), *replicated[index + 1 :]))
    return _each(chosen)


def _on_two_dimensions(arguments: Sequence[Argument]) -> list[tuple[Layout, ...]]:
    pending = Partial("sum")
    pairs = ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (pending, Shard(0)))
    chosen = (tuple(tuple(_possible(at, argument) for at in pair) for argument in arguments) for pair in pairs)
    return list(dict.fromkeys(chosen))


def _like_weights(arguments: Sequence[Argument], weight: Layout) -> list[tuple[Layout, ...]]:
    """Return layouts with all arguments, or the first alone, in the layout of a weight, and scalars replicated."""
    replicated = (Replicate(),) * len(weight)
    every = tuple(weight if argument.ndim else replicated for argument in arguments)
    return list(dict.fromkeys((every, (every[0], *[replicated] * (len(every) - 1)))))


def _possible(at: Placement, argument: Argument) -> Placement:
    """Return the placement if the argument can have it, else a replicated one."""
    if isinstance(at, Shard):
        return at if at.dim < argument.ndim and argument.ndim else Replicate()
    return at if argument.is_differentiable or not at.is_partial() else Replicate()
