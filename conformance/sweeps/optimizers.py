"""Sweep of optimizers over layouts of parameters and gradients, compared with steps on plain tensors."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.optim import Optimizer

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import full
from conformance.oracles.documented_optimizers import documented_steps
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import CoveringSweep, Options, forbids, named
from conformance.sweeps.drawing import share_on
from conformance.sweeps.layouts import Layout, difference, distributed, placed_shard, strided_rows
from conformance.sweeps.line_searches import try_courses
from conformance.sweeps.optimizer_samples import (
    IMPLEMENTATIONS,
    LEARNED,
    OptimizerSample,
    implementations,
    optimizer_samples,
    optimizers,
    options_of,
    sample_of,
)
from conformance.sweeps.refusals import refused_on
from conformance.sweeps.trials import Ended, Swept, Trials, select_samples

STEPS = 3
"""Number of steps that each sample takes: the second is the first with state, the third the first that was updated."""
_PLAIN_STEPS = 8
"""Number of steps on plain tensors alone: RAdam rectifies its sixth step first."""
Shapes = Sequence[tuple[int, ...]]
Places = Sequence[tuple[DeviceMesh | None, Layout]]
"""Mesh and layout of each tensor; no mesh for plain ones."""
State = dict[str, Tensor]
"""Parameters, and tensors and numbers of the optimizer's state, by name."""


_BOUND_OF_PENDING = 2.0**-18
"""Bound on the relative deviation of fp32 numbers where gradients are pending sums.

Ranks may step with their own numbers, which are at most 2, and round them before they are added up: in each of three
steps at most 2**4 operators do, by 2**-24 each.
"""

BOUND_OF_REPLICAS = 2.0**-4
"""Bound on the relative deviation of Muon on replicas, among which DTensor divides its last product.

An iteration makes a s + (b s^2 + c s^4) s, with coefficients 3.44, -4.78 and 2.03, of each of two numbers s = 2**-0.5,
the shares of a matrix of norm 1. Replicas round the terms, of size 2.5 and 1.4, and the sum, of size 1.2, to bf16, by
2**-8; one process rounds the sum alone. That is e = 2**-8 * (2.5 + 1.4 + 2 * 1.2) in a step of size 1.1. Three steps
add up to 3 r e, for a rate r of 0.45 or 1.3. The largest number is above 1.3 r although a tenth decays in each step:
one that was not stepped, of 0.7, or, for a rate of 1.3, one that was, of 2.7 r - 0.8 (with a decay of a quarter of
2.5 r - 0.5). And 3 e / 1.3 is below 2**-4.
"""
_BOUND_OF_BF16_MOMENTUM = 2.0**-7
"""Bound on the relative deviation of an average in bf16: a step rounds it by 2**-9, and halves the errors of others.

No average is more than twice the last one, of which the errors are 2**-9 * 2 * (1 + 1/2 + 1/4 + ...) in all.
"""
_STOPS = ("tolerance_grad", "tolerance_change")
"""Options that keep an optimizer from taking a step."""
_SIZES_OF_SPARSE = (4, 2, 2)
"""Gradients of each step that with a momentum of a half stay integers of two bits, whose squares bf16 has."""


@dataclass(frozen=True)
class Setting:
    """Parameters of an optimizer: their shapes, and layouts of each and of its gradient."""

    kind: str
    shapes: Shapes
    layouts: Sequence[Layout]
    gradients: Sequence[Layout]

    @property
    def is_pending(self) -> bool:
        """True if gradients are pending sums."""
        return any(at.is_partial() for layout in self.gradients for at in layout)

    def bound(self, sample: OptimizerSample) -> float | None:
        """Return the bound on relative deviations; None if bits must be equal."""
        if sample.is_muon and self.kind == "HSDP":
            return BOUND_OF_REPLICAS
        return sample.bound or (_BOUND_OF_PENDING if self.is_pending else None)


@experiment(needs=Needs.SHARDING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Step with every sample in the settings of this mesh; options in the first setting alone."""
    trials = Trials(rank.mesh)
    settings = settings_of(trials.mesh)
    samples = select_samples(optimizer_samples(), lambda sample: sample.name, restricted_to=rank.subjects)
    pairs = [
        (sample, setting)
        for sample in samples
        for setting in (settings[:1] if sample.is_elementwise and not sample.is_usual else settings)
    ]
    for sample, setting in share_on(rank, pairs, _kinds):
        trials.add(sample.name)
        _try_setting(trials, sample, setting)
        if setting is settings[0]:
            call = partial(_plain_faults, sample, numbers_of(setting, sample, trials.mesh))
            trials.attempt(sample.name, "plain tensors", "for-loop", call)
    if not rank.subjects or "LBFGS" in rank.subjects:
        try_courses(trials)
    return trials.swept


def _kinds(pair: "tuple[OptimizerSample, Setting]") -> list[str]:
    """Return the kinds of which a share of the sweep has each: an implementation of an optimizer in a setting."""
    sample, setting = pair
    switches = [name for name in IMPLEMENTATIONS if name in sample.options]
    return [f"{sample.make.__name__} {switches}: {setting.kind}"]


@experiment(needs=Needs.SHARDING)
def pair_sweep(rank: RankWorld) -> Swept:
    """Step with any two options of each optimizer together, and each implementation, on even rows.

    Options that plain tensors refuse together count as refused.
    """
    trials, total, refused = Trials(rank.mesh), Swept(), refused_on(torch.__version__)
    [setting] = [each for each in settings_of(trials.mesh) if each.kind == "even rows"]
    names = {subject.partition("(")[0] for subject in rank.subjects}
    for make in select_samples(optimizers(), lambda make: make.__name__, restricted_to=names):
        options: dict[str, tuple[Any, ...]] = dict.fromkeys(options_of(make), (False, True))
        options["implementation"] = implementations(make)
        ended = partial(_ended_with, trials, setting, make)
        known = named(refused, options, make.__name__)
        rows = CoveringSweep(options, ended, make.__name__, 2, _rules_of(options), known=known)
        total.add(rows.swept(rank.subjects))
    return total


def _rules_of(options: Collection[str]) -> list[Rule]:
    """Return the rules of an optimizer.

    The loss of LBFGS has no maximum, towards which a line search ends anywhere; options that are learned have the
    default implementation alone.
    """
    searches, learned = ({*options} & {*names} for names in (("line_search_fn", "long search"), LEARNED))
    if "maximize" not in options:
        searches = set()
    return [
        *(forbids(name, "maximize", when=lambda search, maximize: search and maximize) for name in searches),
        *(forbids(name, "implementation", when=lambda learns, way: learns and way != "default") for name in learned),
    ]


def _ended_with(trials: Trials, setting: Setting, make: type[Optimizer], row: Options) -> Ended:
    """Step with the options of a row on all ranks; return how it ended."""
    chosen = {
        name: value for option, values in options_of(make).items() if row[option] for name, value in values.items()
    }
    sample = sample_of(make, row["implementation"], chosen)
    numbers = numbers_of(setting, sample, trials.mesh)
    return trials.ended(lambda mesh: _faults(sample, setting, numbers, stepped(sample, numbers), mesh))


def numbers_of(setting: "Setting", sample: OptimizerSample, mesh: DeviceMesh) -> "Numbers":
    """Return the numbers of a sample in a setting; an optimizer that takes matrices alone gets the first ones."""
    shapes = [*takewhile(lambda shape: len(shape) == 2, setting.shapes)] if sample.is_muon else setting.shapes
    return Numbers.of(shapes, sample, mesh.size(mesh.ndim - 1))


def settings_of(mesh: DeviceMesh) -> list[Setting]:
    """Return the settings that a mesh is there for.

    One dimension: rows of which ranks have different numbers or none, rows of equal numbers, vectors alone, columns,
    and gradients laid out otherwise than parameters. Two: parameters of FSDP over tensor parallelism in one optimizer,
    replicas whose gradients are pending sums, as those of norms under sequence parallelism, and HSDP.
    """
    size = mesh.size(mesh.ndim - 1)
    if mesh.ndim == 2:
        norm = (Shard(0), Replicate())
        layouts = [strided_rows(mesh), (Shard(0), Shard(1)), norm]
        norms, pending, hsdp = [norm] * 2, [(Shard(0), Partial("sum"))] * 2, [(Replicate(), Shard(0))] * 2
        return [
            Setting("FSDP and TP", [(4 * size, 3), (2 * size + 1, 2 * size), (5,)], layouts, layouts),
            Setting("pending gradients", [(2 * size, 3), (size,)], norms, pending),
            Setting("HSDP", [(2 * size + 1, 3), (2 * size - 1,)], hsdp, hsdp),
        ]
    rows, columns, replicas = ([(at,)] * 2 for at in (Shard(0), Shard(1), Replicate()))
    uneven = [(2 * size + 1, 4), (2 * size - 1,)]
    return [
        Setting("uneven rows", uneven, rows, rows),
        Setting("even rows", [(2 * size, 4), (size,), (2 * size,)], rows + rows[:1], rows + rows[:1]),
        Setting("vectors", [(2 * size + 1,), (2 * size,)], rows, rows),
        Setting("columns", [(3, 2 * size + 1), (4, 2 * size)], columns, columns),
        Setting("rows on some ranks", [(1, 4), (size - 1,)], rows, rows),
        Setting("replicated gradients", uneven, rows, replicas),
    ]


def _try_setting(trials: Trials, sample: OptimizerSample, setting: Setting) -> None:
    """Step in a setting, unless the optimizer takes matrices alone and the first parameter is none."""
    numbers = numbers_of(setting, sample, trials.mesh)
    if not numbers.parameters:
        return
    expected = trials.expected(sample.name, setting.kind, partial(stepped, sample, numbers))
    if expected is not None:
        call = partial(_faults, sample, setting, numbers, expected)
        trials.attempt(sample.name, setting.kind, f"{len(numbers.parameters)} parameters", call)


@dataclass(frozen=True)
class Numbers:
    """Parameters, and gradients of each step: full or shards, plain tensors or DTensors."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Sequence[Tensor]]

    @classmethod
    def of(cls, shapes: Shapes, sample: OptimizerSample, ranks: int) -> "Numbers":
        """Return multiples of an eighth between -1 and 1, whose sums are exact in any order.

        Muon gets gradients with powers of two of which no rank has two.
        """
        generator = torch.Generator().manual_seed(0)

        def sampled() -> list[Tensor]:
            return [torch.randint(-8, 9, shape, generator=generator).to(sample.dtype) / 8 for shape in shapes]

        if not sample.is_muon:
            return cls(sampled(), [sampled() for _ in range(STEPS)])
        sparse = [_one_number_by_rank(shape, ranks) for shape in shapes]
        return cls(sampled(), [[grad * size for grad in sparse] for size in _SIZES_OF_SPARSE])

    def laid_out(
        self, place: Callable[[Tensor, DeviceMesh, Layout], Tensor], parameters: Places, gradients: Places
    ) -> "Numbers":
        """Return all numbers as `place` lays them out; plain tensors stay as they are."""

        def placed(tensors: Sequence[Tensor], places: Places) -> list[Tensor]:
            pairs = zip(tensors, places, strict=False)
            return [full if mesh is None else place(full, mesh, layout) for full, (mesh, layout) in pairs]

        return Numbers(placed(self.parameters, parameters), [placed(each, gradients) for each in self.gradients])


def _one_number_by_rank(shape: tuple[int, ...], ranks: int) -> Tensor:
    """Return zeros with 1 and -1 in turn, no two of which are in one row, one column or one of `ranks` shards."""
    numbers = torch.zeros(shape)
    firsts = [range(0, length, -(-length // ranks)) for length in shape]
    for index, position in enumerate(zip(firsts[0], *(reversed(positions) for positions in firsts[1:]), strict=False)):
        numbers[position] = (-1) ** index
    return numbers


def stepped(sample: OptimizerSample, numbers: Numbers) -> State:
    """Return parameters and state after all steps; an optimizer that evaluates the loss gets one of the gradients."""
    parameters = [p.clone().requires_grad_(not sample.differentiable) for p in numbers.parameters]
    optimizer = sample.make(parameters, **sample.options)
    for step_gradients in numbers.gradients:
        if sample.is_line_search:
            optimizer.step(partial(quadratic, parameters, step_gradients))
            continue
        for p, grad in zip(parameters, step_gradients, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return dict(state_of(optimizer, parameters))


def quadratic(parameters: Sequence[Tensor], minima: Sequence[Tensor]) -> float:
    """Return a loss whose curvature is 1 to 3 by parameter, and set its gradients."""
    loss = 0.0
    for curvature, (p, minimum) in enumerate(zip(parameters, minima, strict=True), 1):
        distance = p.detach() - minimum
        p.grad = distance * curvature
        size = distance.abs() if distance.is_complex() else distance
        loss += float(full((size * size).sum())) * curvature / 2
    return loss


def state_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and all numbers that an optimizer keeps about them, by name."""
    for index, p in enumerate(parameters):
        yield f"parameter {index}", p.detach()
        for key, value in optimizer.state.get(p, {}).items():
            for number, each in enumerate(value if isinstance(value, list) else [value]):
                if each is not None:
                    yield f"{key} {number} of {index}", torch.as_tensor(each).detach()


def _faults(
    sample: OptimizerSample, setting: Setting, numbers: Numbers, expected: State, mesh: DeviceMesh
) -> dict[str, str]:
    """Return the faults of this rank: bits of its shards for elementwise optimizers, or else of full tensors."""
    parameters, gradients = ([(mesh, at) for at in layouts] for layouts in (setting.layouts, setting.gradients))
    measured = stepped(sample, numbers.laid_out(distributed, parameters, gradients))
    if sample.is_elementwise:
        expected = stepped(sample, numbers.laid_out(placed_shard, parameters, parameters))
    layouts = [layout if sample.is_elementwise else None for layout in setting.layouts]
    return state_faults(measured, expected, layouts, setting.bound(sample))


def _plain_faults(sample: OptimizerSample, numbers: Numbers, _mesh: DeviceMesh) -> dict[str, str]:
    """Return the faults of steps on plain tensors in fp64: none is taken, or they leave other numbers than documented.

    What an optimizer gets wrong on all tensors no comparison of DTensors with plain ones shows. State is compared with
    that of the for-loop.
    """
    gradients = islice(cycle(numbers.gradients), _PLAIN_STEPS)
    wide = Numbers(_in_fp64(numbers.parameters), [_in_fp64(each) for each in gradients])
    measured = stepped(sample, wide)
    kept = [index for index, p in enumerate(wide.parameters) if torch.equal(p, measured[f"parameter {index}"])]
    if kept != [index for index, _ in enumerate(wide.parameters) if sample.options.keys() & {*_STOPS}]:
        return {"step": f"{len(wide.parameters)} parameters, of which no step has changed {kept}"}
    faults = _undocumented(sample, wide, measured) or (_wrong_momentum(sample, wide) if sample.is_muon else {})
    if faults:
        return faults
    if not sample.options.keys() & {*IMPLEMENTATIONS}:
        return {}
    options = {name: value for name, value in sample.options.items() if name not in (*IMPLEMENTATIONS, "capturable")}
    loop = replace(sample, options={**options, "foreach": False})
    layouts = [None] * len(wide.parameters)
    return state_faults(measured, stepped(loop, wide), layouts, sample.bound_of_implementations)


def _undocumented(sample: OptimizerSample, numbers: Numbers, measured: State) -> dict[str, str]:
    """Return how parameters differ from those of the documented algorithm, where there is one."""
    options = {name: _number(value) for name, value in sample.options.items()}
    for index, p in enumerate(numbers.parameters):
        gradients = [gradient[index].numpy() for gradient in numbers.gradients]
        expected = documented_steps(sample.make.__name__, p.numpy(), gradients, options)
        if expected is None:
            break
        name = f"parameter {index}"
        if text := difference(measured[name], torch.from_numpy(expected), bound=sample.bound_of_algorithm):
            return {"algorithm": f"{name}: {text}"}
    return {}


def _wrong_momentum(sample: OptimizerSample, numbers: Numbers) -> dict[str, str]:
    """Return how momentum in bf16, which Muon may take for its matrix, differs from the average of gradients.

    The matrices are multiples of one, so that no parameter shows which momentum they have come from.
    """
    gradients = [[grad.bfloat16() for grad in each] for each in numbers.gradients]
    state = stepped(sample, Numbers([p.bfloat16() for p in numbers.parameters], gradients))
    kept = sample.options["momentum"]
    for index, p in enumerate(numbers.parameters):
        average = torch.zeros_like(p)
        for gradient in numbers.gradients:
            average = kept * average + (1 - kept) * gradient[index]
        measured = state[f"momentum_buffer 0 of {index}"].double()
        if text := difference(measured, average, bound=_BOUND_OF_BF16_MOMENTUM):
            return {"momentum": f"parameter {index}: {text}"}
    return {}


def _number(value: Any) -> Any:
    """Return an option with numbers in place of tensors."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) else value


def _in_fp64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def state_faults(
    measured: State, expected: State, layouts: Sequence[Layout | None], bound: float | None
) -> dict[str, str]:
    """Return how parameters and state differ from shards in the layout of each parameter, or without it, full ones."""
    if measured.keys() != expected.keys():
        return {"state": f"{sorted(measured)}, expected {sorted(expected)}"}
    faults: dict[str, str] = {}
    for name, wanted in expected.items():
        text = difference(measured[name], wanted, bound=bound, layout=layouts[int(name.rpartition(" ")[2])])
        if text:
            faults.setdefault("parameter" if name.startswith("parameter") else "state", f"{name}: {text}")
    return faults
