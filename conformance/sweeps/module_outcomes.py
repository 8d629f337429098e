"""Outcome of a call of a module: outputs and gradients, on shards and in one process, and how they differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.sweeps.layouts import (
    Layout,
    counted_from_first,
    difference,
    distributed,
    integers,
    placed_shard,
    shard_of,
    spelled,
    varied,
    without_pending,
)


@dataclass(frozen=True)
class Outcome:
    """Outputs of a module, and gradients of its inputs and its parameters."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor | None]
    parameters: Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Expectation:
    """Outputs of a parallel module."""

    is_local: bool
    """True if they must be plain tensors."""
    layout: Layout | None
    """Required layout, or that of the shards that plain outputs are; None for any."""
    bound: float = 0.0
    """Bound on the deviation from one process, relative to the largest expected number; 0 if numbers must be equal."""


def with_integers(module: nn.Module) -> nn.Module:
    """Return the module with weights that are small integers."""
    for seed, parameter in enumerate(module.parameters(), 1):
        parameter.data = integers(*parameter.shape, seed=seed).to(parameter.dtype)
    return module


def computed(
    module: nn.Module,
    inputs: Sequence[Tensor],
    seeds: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda outputs: [*map(varied, outputs)],
    *,
    names: Sequence[str] = (),
    forward: Callable[..., Any] | None = None,
) -> Outcome:
    """Compute the module, or `forward` in its place, and backward from the gradients of outputs that `seeds` returns.

    The last inputs are given by `names`.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    count = len(leaves) - len(names)
    call = module if forward is None else forward  # a compiled module has no truth value
    output = call(*leaves[:count], **dict(zip(names, leaves[count:], strict=True)))
    outputs = [*output] if isinstance(output, tuple) else [output]
    pairs = [(x, seed) for x, seed in zip(outputs, seeds(outputs), strict=True) if x.requires_grad]
    if all(x.shape == seed.shape for x, seed in pairs):  # another shape is a fault of the output
        torch.autograd.backward([x for x, _ in pairs], [seed for _, seed in pairs])
    parameters = {name: p.grad for name, p in module.named_parameters()}
    return Outcome([x.detach() for x in outputs], [x.grad for x in leaves], parameters)


def placed_seeds(outputs: Sequence[Tensor], expected: Outcome, out: Expectation, mesh: DeviceMesh) -> Sequence[Tensor]:
    """Return the gradients of the outputs of a parallel module, laid out as the outputs are."""
    return [
        distributed(varied(full), mesh, without_pending(x.placements))
        if isinstance(x, DTensor)
        else placed_shard(varied(full), mesh, out.layout or ())
        for x, full in zip(outputs, expected.outputs, strict=True)
    ]


def differences(
    measured: Outcome, expected: Outcome, given: Sequence[Layout], out: Expectation, mesh: DeviceMesh
) -> Iterator[tuple[str, str]]:
    """Yield how a parallel module, whose inputs have the layouts `given`, differs from one process."""
    for output in measured.outputs:
        if isinstance(output, DTensor) == out.is_local:
            yield "type", type(output).__name__
            return
        if isinstance(output, DTensor) and out.layout is not None:
            layout = counted_from_first(out.layout, output.ndim)
            if tuple(output.placements) != layout:
                yield "layout", f"{spelled(output.placements)}, expected {spelled(layout)}"
    pairs: list[tuple[str, Tensor | None, Tensor | None, Layout | None]] = [
        *(("output", one, full, out.layout) for one, full in zip(measured.outputs, expected.outputs, strict=True)),
        *(
            (f"gradient of input {index}", *each)
            for index, each in enumerate(zip(measured.inputs, expected.inputs, given, strict=True))
        ),
        *((f"gradient of {name}", measured.parameters[name], full, None) for name, full in expected.parameters.items()),
    ]
    for name, one, full, at in pairs:
        wanted = full if full is None or at is None or isinstance(one, DTensor) else shard_of(full, mesh, at)
        if text := difference(one, wanted, bound=out.bound):
            yield name, text
