"""Sweep of tensor-parallel modules and losses over layouts and sizes, compared with one process.

Samples are modules with each style of `parallelize_module`, and cross-entropy under `loss_parallel` of logits sharded
by classes, with all reductions and options. Numbers are small integers where the module computes them exactly, in any
order of sums, or else fp64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    parallel,  # for `PrepareModuleInputOutput`, which torch has from 2.8 on
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.drawing import share_on
from conformance.sweeps.layouts import Layout, distributed, integers, placed_shard, spelled
from conformance.sweeps.module_outcomes import Expectation, Outcome, computed, differences, placed_seeds, with_integers
from conformance.sweeps.operator_samples import Size, sizes
from conformance.sweeps.trials import Swept, Trials, select_samples

Letters = dict[str, int]
"""Size of a dimension by its letter, see `operator_samples.sizes`."""
R, ROWS, COLUMNS, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)


@dataclass(frozen=True)
class ParallelSample:
    """Module with a style, and layouts of its inputs and its output."""

    subject: str
    module: Callable[[Letters], nn.Module]
    tensors: Callable[[Letters], list[Tensor]]
    """Full inputs."""
    given: tuple[Layout, ...]
    """Layout of each input."""
    output: Layout | None
    """Required layout of the output; None for any."""
    style: ParallelStyle | None = None
    is_local: bool = False
    """True if the module must return a plain tensor."""
    exact: bool = True
    takes_dtensors: bool = True
    takes_plain: bool = True
    """True if the module may be given plain shards, too."""
    tries_empty: bool = True
    """True if sizes are tried that leave some ranks without a shard."""
    inner: Layout = ()
    """Layout in which the module computes with plain shards, for any input."""
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of forward and backward."""

    @property
    def case(self) -> str:
        """Layouts as text."""
        output = "any" if self.output is None else spelled(self.output)
        return f"{' x '.join(map(spelled, self.given))} to {'plain ' if self.is_local else ''}{output}"

    @property
    def bound(self) -> float:
        """Bound on the deviation from the module in one process, relative to the largest expected number.

        0 if numbers must be equal. Norms and losses add at most 2**6 numbers and compose at most 2**4 operators that
        are right to within 4 roundings of fp64 and enlarge none by more than 2**2: 2**14 roundings.
        """
        return 0.0 if self.exact else 2.0 ** (14 - 53)


def style_samples() -> Iterator[ParallelSample]:
    """Yield the samples of all styles."""
    yield from _linear()
    yield from _embedding()
    yield from _sequence()
    yield from _prepared()


def _linear_of(has_bias: bool, sizes: Letters) -> nn.Module:
    return with_integers(nn.Linear(sizes["a"], sizes["b"], bias=has_bias))


def _embedding_of(padding: int | None, sizes: Letters) -> nn.Module:
    return with_integers(nn.Embedding(sizes["b"], sizes["a"], padding_idx=padding))


def _norm_of(make: Callable[[int], nn.Module], _sizes: Letters) -> nn.Module:
    return with_integers(make(4))


def _linear() -> Iterator[ParallelSample]:
    styles = {
        ColwiseParallel: ((R, ROWS, LAST), (LAST, R, COLUMNS)),
        RowwiseParallel: ((LAST, R, ROWS), (R, ROWS, LAST)),
    }
    for style, (inputs, outputs) in styles.items():
        for index, (at, to) in enumerate(product(inputs, outputs)):
            for has_bias in (True, False)[: 2 if index == 0 else 1]:
                yield ParallelSample(
                    f"{style.__name__} of Linear{'' if has_bias else ' without bias'}",
                    partial(_linear_of, has_bias),
                    lambda sizes: [integers(sizes["a"], sizes["b"], sizes["a"])],
                    ((at,),),
                    (to,),
                    style(input_layouts=at, output_layouts=to, use_local_output=index % 2 == 0),
                    is_local=index % 2 == 0,
                )


def _embedding() -> Iterator[ParallelSample]:
    for style, padding in product((ColwiseParallel, RowwiseParallel), (None, 0)):
        for index, (at, to) in enumerate(product((R, ROWS), (R, COLUMNS, LAST))):
            yield ParallelSample(
                f"{style.__name__} of Embedding{'' if padding is None else ' with padding'}",
                partial(_embedding_of, padding),
                lambda sizes: [integers(sizes["a"], sizes["b"], low=0, high=sizes["b"] - 1).long()],
                ((at,),),
                (to,),
                style(input_layouts=at, output_layouts=to, use_local_output=index % 2 == 1),
                is_local=index % 2 == 1,
            )


_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": lambda width: nn.LayerNorm(width, dtype=torch.float64),
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False, dtype=torch.float64),
    "RMSNorm": lambda width: nn.RMSNorm(width, dtype=torch.float64),
}
_DROPOUTS: dict[str, Callable[[int], nn.Module]] = {
    "Dropout of nothing": lambda _: nn.Dropout(0.0),
    "Dropout of everything": lambda _: nn.Dropout(1.0),
    "Dropout in evaluation": lambda _: nn.Dropout(0.5).eval(),
}


def _sequence() -> Iterator[ParallelSample]:
    for name, make in (_NORMS | _DROPOUTS).items():
        for index, (dim, is_local) in enumerate(product((1, 0), (False, True))):
            sample = ParallelSample(
                f"SequenceParallel of {name}",
                partial(_norm_of, make),
                lambda sizes: [integers(sizes["a"], sizes["b"], 4).double()],
                ((Shard(dim),),),
                (Shard(dim),),
                SequenceParallel(sequence_dim=dim, use_local_output=is_local),
                is_local=is_local,
                exact=name in _DROPOUTS,
            )
            yield sample
            if index == 0:
                yield replace(sample, given=((R,),), takes_plain=False)


class _Product(nn.Module):
    """Product of two inputs, element by element; the second may be an argument by name."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def _prepared() -> Iterator[ParallelSample]:
    places: Sequence[Placement] = (R, ROWS, COLUMNS)
    for at, to, is_local in product(places, places, (True, False)):
        both, desired = (at, at), (to, to)
        sample = ParallelSample(
            "PrepareModuleInput",
            lambda _: _Product(),
            lambda sizes: [integers(sizes["a"], sizes["b"], 3, seed=seed) for seed in (1, 2)],
            ((at,), (at,)),
            (to,),
            PrepareModuleInput(input_layouts=both, desired_input_layouts=desired, use_local_output=is_local),
            is_local=is_local,
        )
        yield sample
        yield replace(
            sample,
            subject="PrepareModuleOutput",
            style=PrepareModuleOutput(output_layouts=at, desired_output_layouts=to, use_local_output=is_local),
        )
        yield replace(
            sample,
            subject="PrepareModuleInputOutput",
            output=(at,),
            inner=() if is_local else (to,),
            style=parallel.PrepareModuleInputOutput(
                input_layouts=both,
                desired_input_layouts=desired,
                use_local_input=not is_local,
                output_layouts=to,
                desired_output_layouts=at,
                use_local_output=is_local,
            ),
        )


_IGNORED = -100
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", a class ignored": {"ignore_index": 1},
    ", smoothed": {"label_smoothing": 0.25},
}


def loss_samples(dims: int) -> Iterator[ParallelSample]:
    """Yield the samples for a mesh of so many dimensions; of two, the first shards the batch."""
    for reduction in ("mean", "sum", "none"):
        for option, values in _OPTIONS.items():
            for weighted in ("", ", weighted"):
                name = f"loss_parallel, {reduction}{option}{weighted}"
                yield _loss(name, dims, _Loss(reduction=reduction, is_weighted=bool(weighted), **values))
        loss = _Loss(reduction=reduction)
        yield _loss(f"loss_parallel of sequences, {reduction}", dims, loss, rest=(3,))
        yield _loss(f"loss_parallel, padded, {reduction}", dims, loss, ignored="some")
        yield _loss(f"loss_parallel, padded, weighted, {reduction}", dims, _Loss(reduction, True), ignored="some")
        yield _loss(f"loss_parallel, padding alone, {reduction}", dims, loss, ignored="all")
    if dims == 1:
        for reduction, is_weighted in product(("mean", "sum", "none"), (False, True)):
            name = f"loss_parallel of one sample, {reduction}{', weighted' if is_weighted else ''}"
            yield replace(
                _loss(name, dims, _Loss(reduction, is_weighted)),
                tensors=_one_sample,
                given=((ROWS,), (R,)),
                tries_empty=False,
            )
    else:
        sample = _loss("loss_parallel of a replicated batch", dims, _Loss("sum"))
        yield replace(sample, given=((R, COLUMNS), (R, R)))
    yield ParallelSample(
        "loss_parallel left by an error",
        lambda _: _AfterAnError(),
        lambda sizes: [_logits(sizes["a"], 4)],
        ((Shard(0), *(Replicate(),) * (dims - 1)),),
        None,
        exact=False,
        takes_plain=False,
    )
    yield ParallelSample(
        "loss of pixels after loss_parallel",
        lambda _: _OfPixelsAfterwards(),
        lambda sizes: [_logits(sizes["a"], 4, 3, 2), integers(sizes["a"], 3, 2, low=0, high=3, seed=3).long()],
        ((Shard(0), *(Replicate(),) * (dims - 1)),) * 2,
        None,
        exact=False,
        takes_plain=False,
    )
    classes = (*[Shard(0)] * (dims - 1), Shard(1))
    yield ParallelSample(
        "loss_parallel of another loss",
        lambda _: _OfLogProbabilities(),
        lambda sizes: [_logits(2 * sizes["b"], sizes["a"]), integers(2 * sizes["b"], sizes["a"], seed=3).double()],
        (classes, classes),
        None,
        exact=False,
        takes_plain=False,
        tries_empty=False,  # as of other losses but the plain one, see `_loss`
        within=_loss_parallel,
    )


class _Loss(nn.Module):
    """Cross-entropy; the weight of a class is a replicated tensor."""

    def __init__(self, reduction: str, is_weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.is_weighted = is_weighted
        self.options = {"reduction": reduction, **options}

    @property
    def is_plain(self) -> bool:
        """True without any option."""
        return self.options == {"reduction": "mean"} and not self.is_weighted

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        weight = None
        if self.is_weighted:
            classes = logits.size(min(1, logits.ndim - 1))
            weight = 1.0 + torch.arange(classes, dtype=logits.dtype, device=logits.device) % 3
        return nn.functional.cross_entropy(logits, target, weight=weight, **self.options)


class _OfLogProbabilities(nn.Module):
    """Weighted sum of log-probabilities, as of distillation."""

    def forward(self, logits: Tensor, weights: Tensor) -> Tensor:
        return (logits.log_softmax(1) * weights).sum()


class _AfterAnError(nn.Module):
    """Logarithm of softmax after an error inside of `loss_parallel`; the input if that is not over."""

    def forward(self, x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError), loss_parallel():
            raise ZeroDivisionError
        try:
            return x.log_softmax(-1)
        except ValueError:
            return x
        finally:
            _end_loss_parallel()


class _OfPixelsAfterwards(nn.Module):
    """Logits times their gradient of a loss of images, after `loss_parallel`; the logits if that is not over."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        with loss_parallel():
            pass
        given = logits.detach().requires_grad_()
        loss = nn.functional.cross_entropy(given, target, reduction="sum")
        try:
            (gradient,) = torch.autograd.grad(loss, given)
        except ValueError:
            return logits
        return logits * gradient


def _loss(name: str, dims: int, loss: _Loss, *, rest: tuple[int, ...] = (), ignored: str = "none") -> ParallelSample:
    """Return a sample whose targets are classes, or padding: in the first half of the batch, or everywhere.

    Without options alone it is tried where some ranks have no classes: torch hangs there, see
    findings/loss_of_rank_without_classes.py.
    """

    def tensors(sizes: Letters) -> list[Tensor]:
        count, classes = 2 * sizes["b"], sizes["a"]
        target = integers(count, *rest, low=0, high=classes - 1, seed=3).long()
        target[: {"none": 0, "some": count // 2, "all": count}[ignored]] = _IGNORED
        return [_logits(count, classes, *rest), target]

    batch = [Shard(0)] * (dims - 1)
    return ParallelSample(
        name,
        lambda _: loss,
        tensors,
        ((*batch, Shard(1)), (*batch, Replicate())),
        None,
        exact=False,
        takes_plain=False,
        tries_empty=loss.is_plain,
        within=_loss_parallel,
    )


def _one_sample(sizes: Letters) -> list[Tensor]:
    """Return logits of one sample, and its class."""
    return [_logits(sizes["a"]), torch.tensor(1)]


def _logits(*shape: int) -> Tensor:
    return integers(*shape, seed=2).double() / 2


@contextmanager
def _loss_parallel() -> Iterator[None]:
    """Compute losses in parallel, also until an error, after which torch goes on doing so."""
    try:
        with loss_parallel():
            yield
    except Exception:
        _end_loss_parallel()
        raise


def _end_loss_parallel() -> None:
    with loss_parallel():
        pass


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


@experiment(needs=Needs.NOTHING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Try styles on the tensor-parallel ranks if they are all ranks, and losses on the mesh."""
    tp = rank.mesh["tp"]
    is_all = tp.size() == rank.size
    trials = Trials(tp if is_all else rank.mesh)
    samples = [*(style_samples() if is_all else ()), *loss_samples(trials.mesh.ndim)]
    chosen = select_samples(samples, lambda sample: sample.subject, restricted_to=rank.subjects)
    for sample in chosen:
        trials.add(sample.subject)
    pairs = [(sample, size) for sample in chosen for size in _sizes(tp.size()) if sample.tries_empty or size != "empty"]
    for sample, size in share_on(rank, pairs, lambda pair: _kinds(pair[0])):
        _try_size(trials, sample, size)
    return trials.swept


def _kinds(sample: ParallelSample) -> list[str]:
    """Return the kinds of which a share has each: a subject with layouts of inputs, and with that of the output."""
    given, _, output = sample.case.partition(" to ")
    return [f"{sample.subject} {given}", f"{sample.subject} to {output}"]


@experiment(needs=Needs.NOTHING)
def compiled_sweep(rank: RankWorld) -> Swept:
    """Try compiled modules with each style on the tensor-parallel ranks.

    With uneven DTensors where these are the output, too, and with even plain tensors where the output is plain.
    """
    trials = Trials(rank.mesh["tp"])
    samples = (sample for sample in style_samples() if sample.subject in _COMPILED)
    for sample in select_samples(samples, lambda sample: sample.subject, restricted_to=rank.subjects):
        trials.add(sample.subject)
        if sample.is_local:
            _try_size(trials, replace(sample, takes_dtensors=False), "even", is_compiled=True)
        else:
            _try_size(trials, sample, "uneven", is_compiled=True)
    return trials.swept


def _sizes(ranks: int) -> Sequence[Size]:
    """Return the sizes of shards to try; more ranks try those that two do not have."""
    return ("even", "uneven") if ranks == 2 else ("uneven", "empty")


def _try_size(trials: Trials, sample: ParallelSample, size: Size, *, is_compiled: bool = False) -> None:
    """Try a sample with DTensors and, if all ranks have equal shards, with plain tensors."""
    ranks = trials.mesh.size(trials.mesh.ndim - 1)
    letters = sizes(ranks)[size]
    full = sample.tensors(letters)
    if not _is_even(full[0], sample.inner, ranks):
        return
    are_even = all(_is_even(x, layout, ranks) for x, layout in zip(full, sample.given, strict=True))
    expected = computed(sample.module(letters), full)
    for is_plain in [False] * sample.takes_dtensors + [True] * (sample.takes_plain and are_even):
        kind = f"{size} shards of {'plain tensors' if is_plain else 'DTensors'}"
        call = partial(_faults, sample, letters, full, expected, is_plain, is_compiled)
        trials.attempt(sample.subject, kind, sample.case, call)


def _is_even(full: Tensor, layout: Layout, ranks: int) -> bool:
    """Return True if all ranks have equal shards, as torch assumes of plain tensors.

    With unequal ones gloo ends the process, see findings/uneven_shards_as_plain_tensors.py.
    """
    return all(full.size(at.dim) % ranks == 0 for at in layout if isinstance(at, Shard))


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
    out = Expectation(sample.is_local, sample.output, sample.bound)
    with sample.within():
        seeds = partial(placed_seeds, expected=expected, out=out, mesh=mesh)
        measured = computed(module, given, seeds, forward=_compiled(module) if is_compiled else None)
    return dict(differences(measured, expected, sample.given, out, mesh))


def _compiled(module: nn.Module) -> Callable[..., Tensor]:
    """Return the compiled module, as if it were the first of the process; its operators are those of eager mode."""
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")
