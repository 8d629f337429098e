"""Options of parallel styles, any three together, compared with one process.

A module is called three times, with other numbers of rows, before its gradients are compared: what a hook or torch has
kept of one call must not serve another. Inputs are DTensors in the declared layout, DTensors in another layout, or
plain shards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import Options, forbids
from conformance.sweeps.interface_sweep import (
    OMITTED,
    SIZES,
    Faults,
    Interface,
    layout_of,
    shape_of,
    swept_interfaces,
)
from conformance.sweeps.layouts import Layout, distributed, integers, placed_shard
from conformance.sweeps.module_outcomes import Expectation, Outcome, computed, differences, placed_seeds, with_integers
from conformance.sweeps.trials import Swept, Trials

_CALLS = 3
"""Number of calls of a module, each with another number of rows."""
_ROUNDINGS = 2.0 ** (14 - 53)
"""Bound on the deviation of norms in fp64, as of `parallel_styles.ParallelSample.bound`."""
_LAYOUTS = ("R", "S0", "S1")
_GIVEN = ("as declared", "otherwise", "plain")
"""Inputs: DTensors in the declared layout, DTensors in another one, or plain shards in the declared layout."""
_OTHERWISE = {"R": "S0", "S0": "S1", "S1": "R", "S-1": "R"}
"""Another layout than a declared one."""


@experiment(needs=Needs.NOTHING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Try any three options of each style together; any two on two ranks.

    Styles need a mesh of one dimension, of which the names do not matter.
    """
    trials = Trials(rank.mesh)
    return swept_interfaces(style_interfaces(), rank, trials, strength=2 if rank.size == 2 else 3)


def style_interfaces() -> Iterator[Interface]:
    """Yield the interfaces of all styles."""
    yield _prepare_input()
    yield _input_of_another_layout()
    yield _prepare_output()
    yield _prepare_input_output()
    yield from _sharding_styles()
    yield _sequence_parallel()
    yield _parallelize_module()
    yield _input_reshard()


def _is_uneven_and_plain(given: str, size: str) -> bool:
    """Return whether plain tensors are given of a size that ranks do not share equally.

    With unequal ones gloo ends the process, see findings/uneven_shards_as_plain_tensors.py.
    """
    return given == "plain" and size != "even"


_EVEN_IF_PLAIN = forbids("given", "size", when=_is_uneven_and_plain)


# Comparison of a module with one process


@dataclass(frozen=True)
class Call:
    """Inputs of a call: full tensors, positional and by name, and the layouts in which a module is given them."""

    args: Sequence[Tensor]
    kwargs: Mapping[str, Tensor]
    layouts: Sequence[Layout]
    """Layout of each positional input, then of each that has a name."""
    is_plain: Sequence[bool]
    """True for inputs that are given as plain shards."""


def _calls(x: Callable[[int], Tensor], at: Layout, *, is_plain: bool) -> Iterator[Call]:
    """Yield the calls of a module with one input, from a function of the number of the call."""
    for more in range(_CALLS):
        yield Call([x(more)], {}, [at], [is_plain])


def _compared(
    single: nn.Module, module: nn.Module, calls: Iterable[Call], out: Expectation, mesh: DeviceMesh
) -> Faults:
    """Call both modules, and compare outputs and gradients after each call."""
    for call in calls:
        full, names = [*call.args, *call.kwargs.values()], [*call.kwargs]
        expected = computed(single, full, names=names)
        given = [
            (placed_shard if is_plain else distributed)(x, mesh, at)
            for x, at, is_plain in zip(full, call.layouts, call.is_plain, strict=True)
        ]
        measured = computed(module, given, partial(placed_seeds, expected=expected, out=out, mesh=mesh), names=names)
        yield from differences(measured, expected, call.layouts, out, mesh)


# Prepared inputs and outputs


class _Product(nn.Module):
    """Weighted product of two inputs, element by element; with `pairs` it returns their sum, too."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        return (x * y, x + y) if self.pairs else x * y


def _prepare_input() -> Interface:
    return Interface(
        "PrepareModuleInput",
        parallel.PrepareModuleInput,
        values=_INPUTS,
        faults=partial(_prepared, has_input=True, has_output=False),
        conditions=_PREPARED,
        rules=[_EVEN_IF_PLAIN, *_rules_for_plain("use_local_output"), *_MEANINGFUL_INPUTS],
    )


def _input_of_another_layout() -> Interface:
    """Return the interface of DTensors in another layout, see findings/prepared_input_of_another_layout.py."""
    return Interface(
        "PrepareModuleInput, another layout",
        parallel.PrepareModuleInput,
        values={"input_layouts": _LAYOUTS, "use_local_output": (False, True)},
        faults=_prepared_otherwise,
        given=("desired_input_layouts", "input_kwarg_layouts", "desired_input_kwarg_layouts"),  # the first: the same
        conditions={"size": SIZES},
    )


def _prepared_otherwise(options: Options, mesh: DeviceMesh) -> Faults:
    text, is_local = options["input_layouts"], options["use_local_output"]
    layout = layout_of(text)
    style = parallel.PrepareModuleInput(input_layouts=layout, desired_input_layouts=layout, use_local_output=is_local)
    full = integers(*shape_of(options["size"], mesh))
    given = distributed(full, mesh, layout_of(_OTHERWISE[text]))
    output = parallelize_module(nn.Identity(), mesh, style)(given)
    measured, expected = Outcome([output], [], {}), Outcome([full], [], {})
    yield from differences(measured, expected, [], Expectation(is_local, layout), mesh)


def _prepare_output() -> Interface:
    return Interface(
        "PrepareModuleOutput",
        parallel.PrepareModuleOutput,
        values={"output_layouts": _LAYOUTS, "desired_output_layouts": _LAYOUTS, "use_local_output": (True, False)},
        faults=partial(_prepared, has_input=False, has_output=True),
        conditions={**_PREPARED, "outputs": ("one", "two", "two, of which one as it is")},
        rules=[_EVEN_IF_PLAIN, forbids("given", when=lambda given: given == "otherwise")],
    )


def _prepare_input_output() -> Interface:
    return Interface(
        "PrepareModuleInputOutput",
        parallel.PrepareModuleInputOutput,
        values={
            **{name: values for name, values in _INPUTS.items() if name != "use_local_output"},
            "use_local_input": (False, True),
            "desired_output_layouts": _LAYOUTS,
            "use_local_output": (True, False),
        },
        faults=partial(_prepared, has_input=True, has_output=True),
        given=("output_layouts",),  # those in which the module computes
        conditions=_PREPARED,
        rules=[_EVEN_IF_PLAIN, *_rules_for_plain("use_local_input"), *_MEANINGFUL_INPUTS],
    )


_INPUTS: Mapping[str, tuple[Any, ...]] = {
    "input_layouts": (*_LAYOUTS, OMITTED),
    "desired_input_layouts": _LAYOUTS,
    "input_kwarg_layouts": (OMITTED, *_LAYOUTS),
    "desired_input_kwarg_layouts": _LAYOUTS,
    "use_local_output": (False, True),
}
_PREPARED: Mapping[str, tuple[Any, ...]] = {"given": _GIVEN, "size": SIZES}


def _rules_for_plain(option: str) -> list[Rule]:
    """Return the rules for a module that computes with plain shards: of equal sizes, and all of them plain."""
    return [
        forbids(option, "size", when=lambda local, size: local and size != "even"),
        forbids(option, "input_layouts", when=lambda local, layouts: local and layouts == OMITTED),
    ]


_MEANINGFUL_INPUTS = [
    # Inputs of the module have one layout, or it would multiply shards of different elements.
    forbids(*("desired_input_layouts", "desired_input_kwarg_layouts"), when=lambda one, other: one != other),
    # DTensors of another layout than a declared one that is the desired one, too: `_input_of_another_layout`.
    *(
        forbids("given", one, other, when=lambda given, at, to: given == "otherwise" and at == to)
        for one, other in (
            ("input_layouts", "desired_input_layouts"),
            ("input_kwarg_layouts", "desired_input_kwarg_layouts"),
        )
    ),
    # Without layouts of its own an input stays as it is given.
    forbids(
        *("input_layouts", "input_kwarg_layouts", "given"),
        when=lambda args, kwargs, given: args == OMITTED and (kwargs == OMITTED or given != "as declared"),
    ),
]


def _prepared(options: Options, mesh: DeviceMesh, *, has_input: bool, has_output: bool) -> Faults:
    """Compare a module whose inputs and outputs are prepared; the second input may be given by name."""
    pairs = options.get("outputs", "one") != "one"
    single, module = _Product(pairs), _Product(pairs)
    inner = options["desired_input_layouts"] if has_input else options["output_layouts"]
    is_local = options["use_local_input"] if has_input and has_output else options["use_local_output"]
    arguments, by_name = _input_arguments(options) if has_input else ({}, False)
    if has_input and has_output:
        arguments["use_local_input"] = is_local
    else:
        arguments["use_local_output"] = options["use_local_output"]
    if has_output:
        arguments |= _output_arguments(options, inner)
    name = "PrepareModule" + "Input" * has_input + "Output" * has_output
    parallelize_module(module, mesh, getattr(parallel, name)(**arguments))
    declared = [options["input_layouts"], options["input_kwarg_layouts"]] if has_input else [inner, inner]
    if has_input and not by_name:
        declared[1] = declared[0]
    out = Expectation(
        is_local=options["use_local_output"],
        layout=layout_of(options["desired_output_layouts"] if has_output else inner),
    )
    if pairs and options["outputs"] != "two":
        module = _SecondPrepared(module, mesh, inner, out)  # type: ignore[assignment]
    calls = (_prepared_call(options, mesh, declared, inner, by_name, more) for more in range(_CALLS))
    yield from _compared(single, module, calls, out, mesh)


class _SecondPrepared(nn.Module):
    """Module whose second output is left as it is, and prepared here."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, inner: str, out: Expectation) -> None:
        super().__init__()
        self.module, self.mesh, self.inner, self.out = module, mesh, inner, out

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.module(*args)
        if not isinstance(second, DTensor):
            second = DTensor.from_local(second, self.mesh, layout_of(self.inner), run_check=False)
        second = second.redistribute(placements=self.out.layout)
        return first, second.to_local() if self.out.is_local else second


def _input_arguments(options: Options) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a style for inputs, and whether the second input is given by name."""
    by_name = options["input_kwarg_layouts"] != OMITTED
    arguments: dict[str, Any] = {}
    if options["input_layouts"] != OMITTED:
        count = 1 if by_name else 2
        arguments["input_layouts"] = layout_of(options["input_layouts"]) * count
        arguments["desired_input_layouts"] = layout_of(options["desired_input_layouts"]) * count
    if by_name:
        [at], [to] = layout_of(options["input_kwarg_layouts"]), layout_of(options["desired_input_kwarg_layouts"])
        arguments["input_kwarg_layouts"], arguments["desired_input_kwarg_layouts"] = {"y": at}, {"y": to}
    return arguments, by_name


def _output_arguments(options: Options, inner: str) -> dict[str, Any]:
    at: tuple[Placement | None, ...] = layout_of(inner)
    to: tuple[Placement | None, ...] = layout_of(options["desired_output_layouts"])
    outputs = options.get("outputs", "one")
    if outputs == "two":
        at, to = at * 2, to * 2
    elif outputs != "one":
        at, to = (*at, None), (*to, None)
    return {"output_layouts": at, "desired_output_layouts": to, "use_local_output": options["use_local_output"]}


def _prepared_call(
    options: Options, mesh: DeviceMesh, declared: Sequence[str], inner: str, by_name: bool, more: int
) -> Call:
    """Return a call of a prepared module; an input without a declared layout has the one to compute in."""
    x, y = (integers(*shape_of(options["size"], mesh, more), seed=seed) for seed in (more, more + 10))
    names = [inner if text == OMITTED else text for text in declared]
    if options["given"] == "otherwise":
        names = [_OTHERWISE[text] for text in names]
    kwargs = {"y": y} if by_name else {}
    plain = [options["given"] == "plain"] * 2
    return Call([x] if by_name else [x, y], kwargs, [layout_of(text) for text in names], plain)


# Styles that shard parameters


def _sharding_styles() -> Iterator[Interface]:
    shards = {"ColwiseParallel": ("R", "S0", "S-1"), "RowwiseParallel": ("S-1", "R", "S0")}
    for name, inputs in shards.items():
        yield Interface(
            name,
            getattr(parallel, name),
            values={
                "input_layouts": (OMITTED, *inputs),
                "output_layouts": (OMITTED, "R", "S0", "S-1"),
                "use_local_output": (True, False),
            },
            faults=partial(_sharded, name),
            conditions={"bias": (True, False), "frozen": (False, True), "given": _GIVEN, "size": SIZES},
            rules=[
                _EVEN_IF_PLAIN,
                # Gradients of plain uneven outputs: findings/gradient_of_uneven_columns.py.
                forbids("use_local_output", "size", when=lambda local, size: local and size != "even"),
            ],
        )


def _sharded(name: str, options: Options, mesh: DeviceMesh) -> Faults:
    ranks = mesh.size()
    columns = {"even": 2 * ranks, "uneven": 2 * ranks + 1, "few": max(1, ranks - 1)}[options["size"]]
    single, module = (with_integers(nn.Linear(columns, columns, bias=options["bias"])) for _ in range(2))
    for each in (single, module):
        each.get_parameter("weight").requires_grad_(not options["frozen"])
    arguments = {
        each: layout_of(options[each])[0] for each in ("input_layouts", "output_layouts") if options[each] != OMITTED
    }
    style = getattr(parallel, name)(use_local_output=options["use_local_output"], **arguments)
    parallelize_module(module, mesh, style)
    default = ("R", "S-1") if name == "ColwiseParallel" else ("S-1", "R")
    declared, output = (
        default[index] if options[each] == OMITTED else options[each]
        for index, each in enumerate(("input_layouts", "output_layouts"))
    )
    at = _OTHERWISE[declared] if options["given"] == "otherwise" else declared

    def x(more: int) -> Tensor:
        return integers(shape_of(options["size"], mesh, more)[0], columns, seed=more)

    calls = _calls(x, layout_of(at), is_plain=options["given"] == "plain")
    yield from _compared(single, module, calls, Expectation(options["use_local_output"], layout_of(output)), mesh)


def _sequence_parallel() -> Interface:
    return Interface(
        "SequenceParallel",
        parallel.SequenceParallel,
        values={"sequence_dim": (1, 0), "use_local_output": (False, True)},
        faults=_sequenced,
        conditions={"module": ("LayerNorm", "RMSNorm", "Dropout"), "given": _GIVEN, "size": SIZES},
        rules=[_EVEN_IF_PLAIN, forbids("use_local_output", "size", when=lambda local, size: local and size != "even")],
    )


_SEQUENCED: Mapping[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(4, dtype=torch.float64),
    "RMSNorm": lambda: nn.RMSNorm(4, dtype=torch.float64),
    "Dropout": lambda: nn.Dropout(0.0),
}


def _sequenced(options: Options, mesh: DeviceMesh) -> Faults:
    single, module = (with_integers(_SEQUENCED[options["module"]]()) for _ in range(2))
    dim = options["sequence_dim"]
    style = parallel.SequenceParallel(sequence_dim=dim, use_local_output=options["use_local_output"])
    parallelize_module(module, mesh, style)
    at: Layout = (Replicate() if options["given"] == "otherwise" else Shard(dim),)

    def x(more: int) -> Tensor:
        return integers(*shape_of(options["size"], mesh, more), 4, seed=more).double()

    # Where some ranks have no shard, torch may replicate; only the numbers are promised.
    layout: Layout | None = None if options["size"] == "few" else (Shard(dim),)
    out = Expectation(options["use_local_output"], layout, bound=_ROUNDINGS)
    yield from _compared(single, module, _calls(x, at, is_plain=options["given"] == "plain"), out, mesh)


# Plans


class _Block(nn.Module):
    """Two linear layers, in a list and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)
        with_integers(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) / 4
        out: Tensor = self.last(x)
        return out


_PLANS: Mapping[str, Callable[[ParallelStyle], Any]] = {
    "by names": lambda style: {"layers.0": style, "layers.1": style, "last": style},
    "by patterns": lambda style: {"layers.*": style, "l?st": style},
    "of the root": lambda style: {"": {"layers.*": style, "last": style}},
}


def _parallelize_module() -> Interface:
    return Interface(
        "parallelize_module",
        parallelize_module,
        values={
            "device_mesh": ("given", OMITTED),
            "parallelize_plan": tuple(_PLANS),
            "src_data_rank": (0, 1, "none"),
        },
        faults=_planned,
        given=("module",),
        conditions={
            "style": ("ColwiseParallel", "RowwiseParallel"),
            "ranks hold": ("the same", "other numbers"),
            "size": ("even", "uneven"),
        },
        # Ranks with weights of their own are one model where all are taken from one rank.
        rules=[forbids("src_data_rank", "ranks hold", when=lambda rank, held: rank == "none" and held != "the same")],
    )


def _planned(options: Options, mesh: DeviceMesh) -> Faults:
    """Compare a block of layers that take and return replicated tensors."""
    single, module = _Block(), _Block().to(mesh.device_type)
    source, differs = options["src_data_rank"], options["ranks hold"] == "other numbers"
    for each, rank in ((single, source), (module, mesh.get_local_rank())):
        for parameter in each.parameters() if differs else ():
            parameter.data += rank
    style = getattr(parallel, options["style"])(
        input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=False
    )
    plan, data_rank = _PLANS[options["parallelize_plan"]](style), None if source == "none" else source
    if options["device_mesh"] == OMITTED:
        with mesh:
            parallelize_module(module, parallelize_plan=plan, src_data_rank=data_rank)
    else:
        parallelize_module(module, mesh, plan, src_data_rank=data_rank)

    def x(more: int) -> Tensor:
        return integers(shape_of(options["size"], mesh, more)[0], 8, seed=more)

    replicated = (Replicate(),)
    calls = _calls(x, replicated, is_plain=False)
    yield from _compared(single, module, calls, Expectation(False, replicated), mesh)


# Sharded activations


def _input_reshard() -> Interface:
    return Interface(
        "input_reshard",
        input_reshard,
        values={"input_reshard_dim": (OMITTED, 0, 1)},
        faults=_resharded_inputs,
        given=("module", "tp_device_mesh"),
        conditions={"given": ("plain", "DTensor", "rows"), "frozen": (False, True), "scaled": (False, True)},
        # A replicated number has no dimension to shard.
        rules=[forbids("given", "scaled", when=lambda given, scaled: scaled and given != "plain")],
    )


class _ScaledLinear(nn.Linear):
    """Layer whose output a number scales: autograd saves it, and it has fewer elements than there are ranks."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def _resharded_inputs(options: Options, mesh: DeviceMesh) -> Faults:
    """Compare a layer on replicated or sharded inputs of even sizes, the only ones that ranks gather rightly.

    Others end the process, see findings/input_reshard_of_uneven_rows.py.
    """
    columns = 2 * mesh.size()
    make = _ScaledLinear if options["scaled"] else nn.Linear
    single, module = (with_integers(make(columns, columns)) for _ in range(2))
    if options["given"] != "plain":
        distribute_module(module, mesh)
    for each in (single, module):
        each.get_parameter("weight").requires_grad_(not options["frozen"])
    dim = options["input_reshard_dim"]
    input_reshard(module, mesh, **({} if dim == OMITTED else {"input_reshard_dim": dim}))

    def x(more: int) -> Tensor:
        return integers(shape_of("even", mesh, more)[0], columns, seed=more)

    is_plain, layout = options["given"] == "plain", (Shard(0) if options["given"] == "rows" else Replicate(),)
    calls = _calls(x, layout, is_plain=is_plain)
    yield from _compared(single, module, calls, Expectation(is_plain, layout), mesh)
