"""Sweep of tensor-parallel modules and losses over layouts and sizes, compared with one process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.layouts import Layout, difference, distributed, placed_shard, shard_of, spelled, varied
from conformance.experiments.operator_samples import Size, sizes
from conformance.experiments.parallel_losses import loss_samples
from conformance.experiments.parallel_samples import Letters, ParallelSample, style_samples
from conformance.experiments.trials import Swept, Trials, tried
from conformance.run.experiment import Needs

_COMPILED = (
    "ColwiseParallel of Linear",
    "RowwiseParallel of Linear",
    "ColwiseParallel of Embedding",
    "RowwiseParallel of Embedding",
    "SequenceParallel of LayerNorm",
    "SequenceParallel of Dropout of nothing",
    "PrepareModuleInputOutput",
)
"""Subjects that are compiled: one of each kind, since capturing a graph takes a quarter of a second."""


@experiment(needs=Needs.NOTHING)
def sweep(rank: RankWorld) -> Swept:
    """Try styles on the tensor-parallel ranks if they are all ranks, and losses on the mesh."""
    tp = rank.mesh["tp"]
    is_all = tp.size() == rank.size
    trials = Trials(tp if is_all else rank.mesh)
    samples = [*(style_samples() if is_all else ()), *loss_samples(trials.mesh.ndim)]
    for sample in tried(samples, lambda sample: sample.subject):
        trials.add(sample.subject)
        for size in _sizes(tp.size()):
            if sample.tries_empty or size != "empty":
                _try_size(trials, sample, size)
    return trials.swept


@experiment(needs=Needs.NOTHING)
def compiled_sweep(rank: RankWorld) -> Swept:
    """Try compiled modules with each style on the tensor-parallel ranks.

    With uneven DTensors where these are the output, too, and with even plain tensors where the output is plain.
    """
    trials = Trials(rank.mesh["tp"])
    samples = (sample for sample in style_samples() if sample.subject in _COMPILED)
    for sample in tried(samples, lambda sample: sample.subject):
        trials.add(sample.subject)
        if sample.is_local:
            _try_size(trials, replace(sample, takes_dtensors=False), "even", is_compiled=True)
        else:
            _try_size(trials, sample, "uneven", is_compiled=True)
    return trials.swept


def _sizes(ranks: int) -> Sequence[Size]:
    """Return the sizes of shards to try; more ranks try those that two do not have."""
    return ("even", "uneven") if ranks == 2 else ("uneven", "empty")


@dataclass(frozen=True)
class Outcome:
    """Output of a module, and gradients of its inputs and its parameters."""

    output: Tensor
    inputs: Sequence[Tensor | None]
    parameters: dict[str, Tensor | None]


def _try_size(trials: Trials, sample: ParallelSample, size: Size, *, is_compiled: bool = False) -> None:
    """Try a sample with DTensors and, if all ranks have equal shards, with plain tensors."""
    ranks = trials.mesh.size(trials.mesh.ndim - 1)
    letters = sizes(ranks)[size]
    full = sample.tensors(letters)
    if not _is_even(full[0], sample.inner, ranks):
        return
    are_even = all(_is_even(x, layout, ranks) for x, layout in zip(full, sample.given, strict=True))
    expected = _outcome(sample.module(letters), full)
    for is_plain in [False] * sample.takes_dtensors + [True] * (sample.takes_plain and are_even):
        kind = f"{size} shards of {'plain tensors' if is_plain else 'DTensors'}"
        call = partial(_faults, sample, letters, full, expected, is_plain, is_compiled)
        trials.attempt(sample.subject, kind, sample.case, call)


def _is_even(full: Tensor, layout: Layout, ranks: int) -> bool:
    """Return whether all ranks have equal shards, as torch takes for granted of plain tensors.

    With others gloo ends the process, see findings/uneven_shards_as_plain_tensors.py.
    """
    return all(full.size(at.dim) % ranks == 0 for at in layout if isinstance(at, Shard))


def _outcome(
    module: nn.Module,
    given: Sequence[Tensor],
    seed: Callable[[Tensor], Tensor] = varied,
    forward: Callable[..., Tensor] | None = None,
) -> Outcome:
    """Compute the module, or `forward` in its place, and backward from the output's gradient that `seed` returns."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in given]
    output = (module if forward is None else forward)(*inputs)
    gradient = seed(output)
    if output.requires_grad and gradient.shape == output.shape:
        torch.autograd.backward(output, gradient)
    parameters = {name: p.grad for name, p in module.named_parameters()}
    return Outcome(output.detach(), [x.grad for x in inputs], parameters)


def _faults(
    sample: ParallelSample,
    letters: Letters,
    full: Sequence[Tensor],
    expected: Outcome,
    is_plain: bool,
    is_compiled: bool,
    mesh: DeviceMesh,
) -> dict[str, str]:
    """Return the faults that a module shows on this rank."""
    module = sample.module(letters).to(mesh.device_type)
    if sample.style is not None:
        parallelize_module(module, mesh, sample.style)
    place = placed_shard if is_plain else distributed
    given = [place(x.detach(), mesh, at) for x, at in zip(full, sample.given, strict=True)]
    forward = _compiled(module) if is_compiled else None
    with sample.within():
        measured = _outcome(module, given, partial(_seed, sample, expected, mesh), forward)
    return dict(_differences(sample, measured, expected, mesh))


def _compiled(module: nn.Module) -> Callable[..., Tensor]:
    """Return the compiled module, as if it were the first of the process; its operators are those of eager mode."""
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")


def _seed(sample: ParallelSample, expected: Outcome, mesh: DeviceMesh, output: Tensor) -> Tensor:
    """Return the gradient of the output of a sharded module, laid out as the output is."""
    seed = varied(expected.output)
    if isinstance(output, DTensor):
        layout = tuple(Replicate() if at.is_partial() else at for at in output.placements)
        return distributed(seed, mesh, layout)
    return placed_shard(seed, mesh, sample.output or ())


def _differences(
    sample: ParallelSample, measured: Outcome, expected: Outcome, mesh: DeviceMesh
) -> Iterator[tuple[str, str]]:
    output = measured.output
    if sample.is_local == isinstance(output, DTensor):
        yield "type", type(output).__name__
        return
    if isinstance(output, DTensor) and sample.output is not None and not _is_laid_out(output, sample.output):
        yield "layout", f"{spelled(output.placements)}, expected {spelled(sample.output)}"
    pairs: dict[str, tuple[Tensor | None, Tensor | None, Layout | None]] = {
        "output": (output, expected.output, sample.output),
        **{
            f"gradient of input {index}": each
            for index, each in enumerate(zip(measured.inputs, expected.inputs, sample.given, strict=True))
        },
        **{f"gradient of {name}": (measured.parameters[name], p, None) for name, p in expected.parameters.items()},
    }
    for name, (of_shards, of_full, layout) in pairs.items():
        text = _difference(of_shards, of_full, layout, mesh, bound=sample.bound)
        if text:
            yield name, text


def _is_laid_out(tensor: DTensor, layout: Layout) -> bool:
    """Return whether a tensor has a layout, in which dimensions may be counted from the last."""
    dims = [at.dim % tensor.ndim if isinstance(at, Shard) else None for at in layout]
    return dims == [at.dim if isinstance(at, Shard) else None for at in tensor.placements]


def _difference(
    measured: Tensor | None, expected: Tensor | None, layout: Layout | None, mesh: DeviceMesh, *, bound: float
) -> str:
    """Return how an output or gradient differs; a plain tensor is a shard of the layout."""
    if measured is None or expected is None:
        return "" if measured is expected else f"{measured}, expected {expected}"
    if not isinstance(measured, DTensor) and layout is not None:
        expected = shard_of(expected, mesh, layout)
    return difference(measured, expected, bound=bound)
