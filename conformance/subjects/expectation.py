"""Expectation: each step of a subject's run as one process computes it, from the tensors of the ranks before it.

The model in one process is tapped at the places of the run. How much a parallel run may deviate is measured, as for the
laws, see `reference`: in fp32 one process also computes with weights that are off by one unit in the last place, in
several ways, and in fp64, if the model can; for a run in bf16 it computes with parameters in bf16, and under autocast.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conformance.assertions import compare
from conformance.instruments.taps import Number, Tap, Taps
from conformance.instruments.tensor_file import write_tensors
from conformance.oracles.tolerance import FP32_ROUNDOFF
from conformance.run.shards import tensor_file
from conformance.subjects import reference
from conformance.subjects.advancing import buffers_of, model_at, put_back
from conformance.subjects.cells import SubjectCell
from conformance.subjects.data import micro_batches, to_dtype
from conformance.subjects.facts import OwnErrors, StepsJob
from conformance.subjects.protocol import Batch, Subject, module_names
from conformance.subjects.turns import turn_of, turns_of

FACTS_FILE = "expected.msgpack"
TENSORS_FILE = "expected.safetensors"
"""Tensors by key: gradients `stepN/gradient/NAME`, and results of the optimizer, see `_updates`.

Those that a wrong weight decay leaves are `rankR/DECAY/stepN/KIND/NAME`, see `Decay`.
"""
Decay = Literal["missing", "decoupled", "added", "everywhere"]
"""Wrong ways of weight decay: none, of the weights, added to gradients (L2), or of parameters that have none, too."""
Named = Callable[[str], str]


class TapErrors(msgspec.Struct, frozen=True):
    """Own errors of the taps of one data-parallel rank, in the order of the taps."""

    own: list[float]
    """Relative deviation of each tensor; infinite for one that cannot be compared."""
    overall: list[float]
    """Deviation of all tensors of the tap's kind together."""
    dtypes: list[list[str]]
    """Dtypes that the tensor may have; any if there is none."""


class ExpectedStepFacts(msgspec.Struct, frozen=True):
    """Measurements of one step."""

    taps: list[TapErrors]
    """By data-parallel rank."""
    gradients: OwnErrors
    loss: float
    """Mean loss."""
    loss_error: float
    """Largest relative deviation of the loss."""
    updates: dict[str, float]
    """Relative deviation of the optimizer's results between fp32 and fp64, by `KIND/NAME`."""


class Expectation(msgspec.Struct, frozen=True):
    """Measurements of the steps that begin with finite weights, up to the first that does not."""

    reduction: str
    """Reduction of gradients over data-parallel ranks, `mean` or `sum`, if the subject declares it; else empty."""
    steps: list[ExpectedStepFacts]


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory with the taps of a step, by data-parallel rank."""
    return directory / f"step{step}"


def write_expected_steps(subject: Subject, job: StepsJob) -> None:
    """Compute all steps, and write their taps, tensors and measurements into the job's directory."""
    directory, steps = Path(job.directory), range(len(job.cell.accumulation))
    weights = load_file(job.weights)
    tensors: dict[str, Tensor] = {}
    updates, update_errors = _updates(subject, job, weights)
    facts = []
    for step in steps:
        masters = reference.initial_model(subject, tied=job.cell.tied)
        if not all(bool(weights[f"step{step}/{name}"].isfinite().all()) for name, _ in masters.named_parameters()):
            break  # an earlier step is wrong
        advancing = model_at(masters, subject, job.cell.workload, step=step, weights=weights)
        computed = _Step(subject, job.cell, step, advancing)
        taps, gradients = computed.run(masters)
        step_directory(directory, step).mkdir()
        for data_rank, each in enumerate(taps):
            each.write(step_directory(directory, step), rank=data_rank)
        tensors |= {f"step{step}/gradient/{name}": gradient for name, gradient in gradients.items()}
        facts.append(computed.facts(masters, taps, gradients, updates=update_errors.get(step, {})))
    write_tensors(
        directory / TENSORS_FILE, {key: tensor.cpu().contiguous() for key, tensor in (tensors | updates).items()}
    )
    expectation = Expectation(str(getattr(subject, "reduction", "")), facts)
    (directory / FACTS_FILE).write_bytes(msgspec.msgpack.encode(expectation))


class _Step:
    """One step of a cell in one process."""

    def __init__(self, subject: Subject, cell: SubjectCell, step: int, advancing: Sequence[str]) -> None:
        """`advancing` are names of buffers that begin as before the step for each rank."""
        self._turn, self._cell, self._step, self._advancing = turn_of(subject, step), cell, step, advancing
        ranks = range(cell.data_ranks)
        self._batches = [micro_batches(subject, cell.workload, step=step, data_rank=rank) for rank in ranks]
        self._count = sum(subject.count(batch) for batch in chain.from_iterable(self._batches))

    def run(
        self, model: nn.Module, *, dtype: torch.dtype | None = None, autocast: bool = False
    ) -> tuple[list[Taps], dict[str, Tensor]]:
        """Return taps by data-parallel rank, and the gradients of the mean loss, with batches in a dtype."""
        named = module_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        sums: dict[str, Tensor] = {}
        taps, before = [], buffers_of(model, self._advancing)
        for batches in self._batches:
            put_back(model, before)
            taps.append(Taps(named=named))
            with taps[-1].attached(model):
                for batch in batches:
                    self._take(model, batch if dtype is None else to_dtype(batch, dtype), taps[-1], autocast=autocast)
                    _add_gradients(model, sums)
        put_back(model, before)
        return taps, {name: each for name, each in sums.items() if self._turn.trains(name)}

    def _take(self, model: nn.Module, batch: Batch, taps: Taps, *, autocast: bool) -> None:
        taps.phase("forward", step=self._step)
        with torch.autocast(reference.device_type(model), torch.bfloat16, enabled=autocast):
            loss = self._turn.subject.loss(model, batch)
        taps.phase("backward", step=self._step)
        mean = loss / self._count
        taps.numbers.setdefault(f"{self._step} backward", []).append(Number(-1, float(mean.detach())))
        torch.autograd.backward(mean)

    def facts(
        self,
        masters: nn.Module,
        taps: Sequence[Taps],
        gradients: Mapping[str, Tensor],
        *,
        updates: dict[str, float],
    ) -> ExpectedStepFacts:
        """Return the largest deviations of other computations of the step."""
        loss, loss_error = self._loss(taps), 0.0
        measured = [_Deviations(each) for each in taps]
        others = []
        for other_taps, other_gradients in self._others(masters):
            for deviations, each in zip(measured, other_taps, strict=True):
                deviations.add(each)
            others.append({name: other_gradients[name] for name in gradients})
            loss_error = max(loss_error, abs(self._loss(other_taps) - loss) / (abs(loss) or 1.0))
        is_bf16 = self._cell.precision == "bf16"
        return ExpectedStepFacts(
            taps=[each.errors(with_dtypes=is_bf16) for each in measured],
            gradients=reference.own_errors(others, gradients, None),
            loss=loss,
            loss_error=loss_error,
            updates=updates,
        )

    def _loss(self, taps: Sequence[Taps]) -> float:
        """Return the mean loss, from the terms of all micro-batches."""
        return sum(number.value for each in taps for number in each.numbers[f"{self._step} backward"])

    def _others(self, masters: nn.Module) -> Iterator[tuple[list[Taps], dict[str, Tensor]]]:
        if self._cell.precision == "bf16":
            with suppress(*reference.REFUSALS):
                yield self.run(reference.parameters_in_bf16(masters))
            yield self.run(masters, autocast=True)
            return
        for seed in range(reference.ORDERS):
            yield self.run(_perturbed(masters, seed=seed))
        with suppress(*reference.REFUSALS):
            yield self.run(reference.promoted(masters, torch.float64), dtype=torch.float64)


class _Deviations:
    """Largest deviations of other computations from taps."""

    def __init__(self, taps: Taps) -> None:
        self._taps = taps
        self._own = [0.0] * len(taps.taps)
        self._overall: dict[str, float] = defaultdict(float)
        self._dtypes: list[set[str]] = [set() for _ in taps.taps]

    def add(self, other: Taps) -> None:
        """Compare with another computation; places that it lacks cannot be compared."""
        index = {tap.place: number for number, tap in enumerate(other.taps)}
        differences: dict[str, float] = defaultdict(float)
        sizes: dict[str, float] = defaultdict(float)
        for number, (tap, tensor) in enumerate(zip(self._taps.taps, self._taps.tensors, strict=True)):
            found = index.get(tap.place)
            if found is None:
                self._own[number] = math.inf
                continue
            self._dtypes[number].add(other.taps[found].dtype)
            if not tensor.is_floating_point():
                continue
            deviation = compare.deviation(other.tensors[found], tensor)
            self._own[number] = max(self._own[number], deviation)
            if math.isfinite(deviation):
                size = float(tensor.double().norm())
                differences[tap.kind] += (deviation * size if size else deviation) ** 2
                sizes[tap.kind] += size**2
        for kind, size in sizes.items():
            overall = math.sqrt(differences[kind] / size) if size else 0.0
            self._overall[kind] = max(self._overall[kind], overall)

    def errors(self, *, with_dtypes: bool) -> TapErrors:
        """Return the largest deviations; dtypes are told for outputs of modules that compute with parameters."""
        taps = self._taps.taps
        computing = {tap.module for tap in taps if tap.kind == "parameter"}
        dtypes = [
            sorted(found) if not with_dtypes or _is_told(tap, computing) else []
            for tap, found in zip(taps, self._dtypes, strict=True)
        ]
        own_dtypes = [[tap.dtype] for tap in taps]
        return TapErrors(self._own, [self._overall[tap.kind] for tap in taps], dtypes if with_dtypes else own_dtypes)


def _is_told(tap: Tap, computing: set[str]) -> bool:
    """Return whether the dtype of a tensor in mixed precision shows the policy: others depend on where it casts."""
    return tap.kind == "output" and bool(tap.module) and tap.module in computing


def _add_gradients(model: nn.Module, sums: dict[str, Tensor]) -> None:
    """Add the gradients of a micro-batch to sums of at least fp32, and forget them."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
            sums[name] = sums[name] + gradient if name in sums else gradient
    model.zero_grad()


def _perturbed(model: nn.Module, *, seed: int) -> nn.Module:
    """Return a copy of a model whose weights are off by one unit in the last place, up or down."""
    copy, generator = reference.promoted(model, torch.float32), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1.0 + 2.0 * FP32_ROUNDOFF * signs.to(parameter.device))
    return copy


def _updates(
    subject: Subject, job: StepsJob, full: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[int, dict[str, float]]]:
    """Return the optimizer's results on full tensors and on the shards of each rank, and by step their errors.

    Results have the keys `full/stepN/KIND/NAME` and `rankR/stepN/KIND/NAME`, errors `KIND/NAME`. Both results are the
    same for an optimizer that computes each element by itself, and differ for one that needs norms or products of full
    tensors, as LAMB and Muon do.
    """
    tensors: dict[str, Tensor] = {}
    errors: dict[int, dict[str, float]] = {}
    held = {"full": full} | {
        f"rank{rank}": load_file(Path(job.record) / tensor_file(rank)) for rank in range(job.cell.world_size)
    }
    for holder, begun in held.items():
        single = _plain_steps(subject, job.cell, begun, dtype=None)
        exact: dict[str, Tensor] = {}
        with suppress(*reference.REFUSALS):
            exact = _plain_steps(subject, job.cell, begun, dtype=torch.float64)
        for decay in get_args(Decay):
            wrong = _plain_steps(subject, job.cell, begun, dtype=None, decay=decay)
            tensors |= {f"{holder}/{decay}/{key}": each for key, each in wrong.items()}
        for key, tensor in single.items():
            tensors[f"{holder}/{key}"] = tensor
            when, _, name = key.partition("/")
            step_errors = errors.setdefault(int(when.removeprefix("step")), {})
            deviation = compare.deviation(tensor, exact[key]) if key in exact else 0.0
            step_errors[name] = max(step_errors.get(name, 0.0), deviation)
    return tensors, errors


def _plain_steps(
    subject: Subject,
    cell: SubjectCell,
    shards: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    decay: Decay | None = None,
) -> dict[str, Tensor]:
    """Return the optimizer's results by `stepN/KIND/NAME`; each step begins with the state of the run.

    Tensors that are no shards, as a count of steps, go on from step to step. With a wrong `decay` of weights nothing is
    returned for an optimizer that has none.
    """

    def kept(key: str) -> Tensor:
        return shards[key].clone() if dtype is None else shards[key].to(dtype)

    steps = range(len(cell.accumulation))
    turns = turns_of(subject)
    clipped_first = [key.split("/", 2) for key in shards if "/clipped/" in key]
    names = dict.fromkeys(name for when, _, name in clipped_first if int(when.removeprefix("step")) < len(turns))
    parameters = {name: nn.Parameter(kept(f"step0/parameter/{name}")) for name in names}
    trained = [[each for name, each in parameters.items() if turn.trains(name)] for turn in turns]
    if not all(trained):
        return {}
    optimizers = [turn.subject.make_optimizer(own) for turn, own in zip(turns, trained, strict=True)]
    if decay and not any(group.get("weight_decay") for each in optimizers for group in each.param_groups):
        return {}
    left: dict[str, Tensor] = {}
    for step in steps:
        optimizer = optimizers[step % len(turns)]
        before = "resumed" if cell.resumed and step == cell.saved_after else f"after{step - 1}"
        for name, parameter in parameters.items():
            if f"step{step}/parameter/{name}" in shards:
                parameter.data = kept(f"step{step}/parameter/{name}")
            clipped = f"step{step}/clipped/{name}"
            parameter.grad = kept(clipped) if clipped in shards else None
            for kind, state in _shaped_state(optimizer, parameter).items():
                if f"{before}/{kind}/{name}" in shards:
                    state.copy_(shards[f"{before}/{kind}/{name}"])
        with _decaying(optimizer, decay):
            optimizer.step()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                found = {"parameter": parameter.detach(), **_shaped_state(optimizer, parameter)}
                left |= {f"step{step}/{kind}/{name}": tensor.clone() for kind, tensor in found.items()}
    return left


@contextmanager
def _decaying(optimizer: torch.optim.Optimizer, decay: Decay | None) -> Iterator[None]:
    """Open a context in which an optimizer decays weights in a wrong way, or in its own for None."""
    groups = optimizer.param_groups
    own = [float(group.get("weight_decay", 0.0)) for group in groups]
    if decay is not None:
        for group, rate in zip(groups, own, strict=True):
            for parameter in group["params"] if decay in ("decoupled", "added") else ():
                with torch.no_grad():
                    if decay == "added" and parameter.grad is not None:
                        parameter.grad.add_(parameter, alpha=rate)
                    elif parameter.grad is not None:
                        parameter.mul_(1.0 - float(group["lr"]) * rate)
            group["weight_decay"] = max(own) if decay == "everywhere" else 0.0
    yield
    for group, rate in zip(groups, own, strict=True):
        if "weight_decay" in group:
            group["weight_decay"] = rate


def _shaped_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {kind: t for kind, t in state.items() if isinstance(t, Tensor) and t.shape == parameter.shape}
