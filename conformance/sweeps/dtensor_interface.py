"""DTensor's functions and methods with any three options together, compared with full tensors.

Numbers are small integers, which every dtype has, but for `dtype of sums`, where rounding shows in which dtype ranks
add. All calls are on one mesh, with shapes in turn: a decision that torch keeps must not serve another shape.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import Options, forbids
from conformance.sweeps.dtensor_corners import corners
from conformance.sweeps.dtensor_members import tensor_of_other_ranks
from conformance.sweeps.interface_sweep import (
    DTYPES,
    OMITTED,
    SIZES,
    Faults,
    Interface,
    layout_of,
    layouts,
    shape_of,
    swept_interfaces,
)
from conformance.sweeps.layouts import (
    Layout,
    counted_from_first,
    difference,
    distributed,
    integers,
    placed_shard,
    shard_of,
    spelled,
    strided_rows,
    varied,
    without_pending,
)
from conformance.sweeps.trials import Swept, Trials

_STRIDED = "strided"
"""Source with the layout that FSDP gives to parameters that tensor parallelism has sharded by rows."""


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Try any three options of each interface together; any two on two ranks, which every commit affords."""
    trials = Trials(rank.mesh)
    return swept_interfaces(interfaces(trials.mesh), rank, trials, strength=2 if rank.size == 2 else 3)


def interfaces(mesh: DeviceMesh) -> Iterator[Interface]:
    """Yield the interfaces that a mesh is there for."""
    yield _redistribute(mesh)
    if mesh.size() == 2:
        yield _dtype_of_sums(mesh)
    yield _from_local(mesh)
    yield _to_local(mesh)
    yield _full_tensor(mesh)
    yield _distribute_tensor(mesh)
    yield _argument_of_distribution(mesh)
    yield _pending_integers(mesh)
    yield _distribute_module()
    yield tensor_of_other_ranks(mesh)
    yield from corners(mesh)
    yield from _factories(mesh)


def _source(options: Options, mesh: DeviceMesh, full: Tensor) -> DTensor:
    """Return the tensor in the source layout; a strided one has as many rows as ranks can share equally."""
    if options["source"] == _STRIDED:
        return distributed(full, mesh, strided_rows(mesh))
    return distributed(full, mesh, layout_of(options["source"]))


def _full(options: Options, mesh: DeviceMesh) -> Tensor:
    return integers(*shape_of(options["size"], mesh)).to(DTYPES[options["dtype"]])


def _layout(options: Options, mesh: DeviceMesh, name: str = "placements") -> Layout:
    """Return the layout that an option spells, with dimensions counted from the first; replicas if it is left out."""
    text = _each(mesh, "R") if options[name] == OMITTED else options[name]
    return counted_from_first(layout_of(text), 2)


def _arguments(options: Options, mesh: DeviceMesh, *names: str) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that options leave out."""

    def argument(name: str) -> Any:
        if name == "device_mesh":
            return mesh
        return list(layout_of(options[name])) if "placements" in name else DTYPES.get(options[name], options[name])

    return {name: argument(name) for name in names if name in options and options[name] != OMITTED}


def _within(options: Options, mesh: DeviceMesh) -> AbstractContextManager[Any]:
    """Return the mesh as a context if a call does not name it."""
    return cast("AbstractContextManager[Any]", mesh) if options["device_mesh"] == OMITTED else nullcontext()


def _compared(fault: str, measured: Tensor, expected: Tensor, layout: Layout | None = None) -> Faults:
    """Yield a fault if a tensor has other numbers, shape, dtype or layout."""
    if isinstance(measured, DTensor) and layout is not None and tuple(measured.placements) != layout:
        yield "layout", f"{spelled(measured.placements)}, expected {spelled(layout)}"
        return
    text = difference(measured, expected, bound=0.0)
    if text:
        yield fault, text


def _gradient(full: Tensor, mesh: DeviceMesh, text: str, dtype: torch.dtype) -> DTensor:
    return distributed(full.to(dtype), mesh, layout_of(text))


# Redistribution


def _redistribute(mesh: DeviceMesh) -> Interface:
    sources = [*layouts(mesh.ndim, ("R", "S0", "S1", "P")), *([_STRIDED] if mesh.ndim == 2 else [])]
    return Interface(
        "DTensor.redistribute",
        DTensor.redistribute,
        values={
            "device_mesh": (OMITTED, "given"),
            "placements": layouts(mesh.ndim, ("R", "S0", "S1", "S-1") if mesh.ndim == 1 else ("R", "S0", "S-1")),
            "forward_dtype": (OMITTED, "bf16", "fp64"),
            "backward_dtype": (OMITTED, "bf16", "fp64"),
        },
        faults=_redistributed,
        conditions={
            "source": tuple(sources),
            "size": SIZES,
            "dtype": ("fp32", "bf16"),
            "gradient": ("as result", "pending", "replicated"),
            "order": (1, 2),
        },
        # Full tensors of uneven strided shards: findings/full_state_dict_of_uneven_strided_shards.py.
        rules=[forbids("source", "size", when=lambda source, size: source == _STRIDED and size != "even")],
    )


def _redistributed(options: Options, mesh: DeviceMesh) -> Faults:
    full = _full(options, mesh)
    given = _source(options, mesh, full)
    given.requires_grad_()
    arguments = _arguments(options, mesh, "device_mesh", "async_op", "forward_dtype", "backward_dtype")
    result = given.redistribute(placements=layout_of(options["placements"]), **arguments)
    target = _layout(options, mesh)
    expected = full.to(DTYPES.get(options["forward_dtype"], full.dtype))
    yield from _compared("result", result.to_local(), shard_of(expected, mesh, target))
    yield from _compared("full tensor", result.full_tensor(), expected)
    kinds = {"as result": options["placements"], "pending": _each(mesh, "P"), "replicated": _each(mesh, "R")}
    weights = _gradient(varied(expected), mesh, kinds[options["gradient"]], expected.dtype)
    if options["order"] == 1:
        torch.autograd.backward(result, weights)
        assert isinstance(given.grad, DTensor)
        yield from _compared("gradient", given.grad, varied(full))
        return
    weights.requires_grad_()
    [first] = torch.autograd.grad(result, given, weights, create_graph=True)
    yield from _compared("gradient", first, varied(full))
    seed = distributed(full, mesh, without_pending(cast("DTensor", first).placements))
    [second] = torch.autograd.grad(first, weights, seed)
    yield from _compared("second gradient", second, full.to(expected.dtype))


def _each(mesh: DeviceMesh, placement: str) -> str:
    return ",".join([placement] * mesh.ndim)


_HALF_ULP = 0.1875
"""Share of each of two ranks: 3/8 of the distance between the numbers of bf16 from 64 to 128.

A rank that rounds to bf16 first loses its share, two that add first keep both.
"""


def _dtype_of_sums(mesh: DeviceMesh) -> Interface:
    return Interface(
        "DTensor.redistribute, dtype of sums",
        DTensor.redistribute,
        values={
            "placements": ("R", "S0", "S1"),
            "forward_dtype": (OMITTED, "bf16"),
            "backward_dtype": (OMITTED, "bf16"),
        },
        faults=_summed,
        given=("device_mesh",),
        conditions={"size": SIZES},
    )


def _summed(options: Options, mesh: DeviceMesh) -> Faults:
    """Reduce numbers of two ranks forward and backward, in the dtype that the call asks for."""
    shape = shape_of(options["size"], mesh)
    base = 64 + integers(*shape).abs()

    def pending(dtype: torch.dtype) -> DTensor:
        own = (base if mesh.get_local_rank() == 0 else torch.zeros(shape)) + _HALF_ULP
        return DTensor.from_local(own.to(dtype), mesh, [Partial()], run_check=False)

    def total(text: str) -> Tensor:
        """Return the sum in fp32: of rounded numbers, or of exact ones."""
        return base if text == "bf16" else base + 2 * _HALF_ULP

    arguments = _arguments(options, mesh, "async_op", "forward_dtype", "backward_dtype")
    target = layout_of(options["placements"])
    result = pending(torch.float32).redistribute(placements=target, **arguments)
    forward = total(options["forward_dtype"]).to(DTYPES.get(options["forward_dtype"], torch.float32))
    yield from _compared("sum", result.to_local(), shard_of(forward, mesh, target))
    given = distributed(base, mesh, target)
    given.requires_grad_()
    same = given.redistribute(placements=[Replicate()], **{**arguments, "forward_dtype": None})
    torch.autograd.backward(same, pending(torch.float32))
    assert isinstance(given.grad, DTensor)
    yield from _compared("sum of gradients", given.grad, total(options["backward_dtype"]))


# Conversion from and to plain tensors


def _from_local(mesh: DeviceMesh) -> Interface:
    def is_unknown(placements: str, size: str, shape: str) -> bool:
        """Return whether torch cannot know the shape: it takes shards for equal."""
        return shape == OMITTED and size != "even" and "S" in placements

    return Interface(
        "DTensor.from_local",
        DTensor.from_local,
        values={
            "device_mesh": ("given", OMITTED),
            "placements": (*layouts(mesh.ndim, ("R", "S0", "S-1", "P")), OMITTED),
            "shape": ("given", OMITTED),
            "grad_placements": (OMITTED, *layouts(mesh.ndim, ("R", "S0"))),
        },
        faults=_from_plain,
        given=("local_tensor", "stride"),  # with `shape`
        conditions={"size": SIZES, "dtype": ("fp32", "bf16"), "ranks hold": ("the same", "other numbers")},
        rules=[
            forbids("placements", "size", "shape", when=is_unknown),
            # Other numbers on each rank: a replicated tensor is defined with run_check alone.
            forbids(
                *("placements", "run_check", "ranks hold"),
                when=lambda placements, checks, held: (
                    held != "the same" and (not checks or placements not in (OMITTED, _each(mesh, "R")))
                ),
            ),
            # A gradient of another layout must have the shape of the local tensor.
            forbids(
                *("placements", "grad_placements"),
                when=lambda placements, gradient: gradient not in (OMITTED, placements.replace("P", "R")),
            ),
        ],
    )


def _from_plain(options: Options, mesh: DeviceMesh) -> Faults:
    full = _full(options, mesh)
    layout = _layout(options, mesh)
    local = placed_shard(full, mesh, layout)
    if options["ranks hold"] == "other numbers":
        local += torch.distributed.get_rank()
    local.requires_grad_()
    arguments = _arguments(options, mesh, "device_mesh", "run_check", "placements", "grad_placements")
    if options["shape"] != OMITTED:
        arguments |= {"shape": full.shape, "stride": full.stride()}
    with _within(options, mesh):
        result = DTensor.from_local(local, **arguments)
    yield from _compared("result", result.full_tensor(), full)
    torch.autograd.backward(result, distributed(varied(full), mesh, (Replicate(),) * mesh.ndim))
    assert local.grad is not None
    yield from _compared("gradient", local.grad, shard_of(varied(full), mesh, without_pending(layout)))


def _to_local(mesh: DeviceMesh) -> Interface:
    return Interface(
        "DTensor.to_local",
        DTensor.to_local,
        values={"grad_placements": (OMITTED, *layouts(mesh.ndim, ("R", "S0", "S1", "P")))},
        faults=_to_plain,
        conditions={"source": layouts(mesh.ndim, ("R", "S0", "S1", "P")), "size": SIZES, "dtype": ("fp32", "bf16")},
        # A gradient has the shape of the local tensor: replicated or pending where that is.
        rules=[forbids("source", "grad_placements", when=_has_another_shape)],
    )


def _has_another_shape(source: str, gradient: str) -> bool:
    if gradient == OMITTED:
        return False
    pairs = zip(source.split(","), gradient.split(","), strict=True)
    return any(one != other and {one, other} & {"S0", "S1"} for one, other in pairs)


def _to_plain(options: Options, mesh: DeviceMesh) -> Faults:
    full = _full(options, mesh)
    layout = layout_of(options["source"])
    given = distributed(full, mesh, layout)
    given.requires_grad_()
    local = given.to_local(**_arguments(options, mesh, "grad_placements"))
    yield from _compared("result", local, shard_of(full, mesh, layout))
    text = options["source"].replace("P", "R") if options["grad_placements"] == OMITTED else options["grad_placements"]
    torch.autograd.backward(local, placed_shard(varied(full), mesh, layout_of(text)))
    assert isinstance(given.grad, DTensor)
    yield from _compared("gradient", given.grad, varied(full))


def _full_tensor(mesh: DeviceMesh) -> Interface:
    return Interface(
        "DTensor.full_tensor",
        DTensor.full_tensor,
        values={"grad_placements": (OMITTED, *layouts(mesh.ndim, ("R", "P")))},
        faults=_gathered,
        conditions={"source": layouts(mesh.ndim, ("R", "S0", "S1", "P")), "size": SIZES, "dtype": ("fp32", "bf16")},
    )


def _gathered(options: Options, mesh: DeviceMesh) -> Faults:
    full = _full(options, mesh)
    given = distributed(full, mesh, layout_of(options["source"]))
    given.requires_grad_()
    gathered = given.full_tensor(**_arguments(options, mesh, "grad_placements"))
    yield from _compared("result", gathered, full)
    torch.autograd.backward(gathered, placed_shard(varied(full), mesh, _layout(options, mesh, "grad_placements")))
    assert isinstance(given.grad, DTensor)
    yield from _compared("gradient", given.grad, varied(full))


# Distribution of full tensors and modules


def _distribute_tensor(mesh: DeviceMesh) -> Interface:
    last = min(mesh.size(dim) for dim in range(mesh.ndim)) - 1
    return Interface(
        "distribute_tensor",
        distribute_tensor,
        values={
            "device_mesh": ("given", OMITTED),
            "placements": (*layouts(mesh.ndim, ("R", "S0", "S-1", "P")), OMITTED),
            "src_data_rank": (0, last, "none"),
        },
        faults=_distributed_tensor,
        given=("tensor",),
        conditions={
            "size": SIZES,
            "dtype": ("fp32", "bf16", "int64"),
            "requires_grad": (False, True),
            "parameter": (False, True),
            "strides": ("contiguous", "transposed"),
            "ranks hold": ("other numbers", "the same"),
        },
        rules=[
            forbids("dtype", "requires_grad", when=lambda dtype, requires: dtype == "int64" and requires),
            forbids("dtype", "placements", when=lambda dtype, placements: dtype == "int64" and "P" in placements),
            # Ranks with numbers of their own hold shards of different tensors; replicas and sums are not defined.
            forbids(
                *("placements", "src_data_rank", "ranks hold"),
                when=lambda placements, source, held: (
                    source == "none"
                    and held != "the same"
                    and (placements == OMITTED or not {"R", "P"}.isdisjoint(placements))
                ),
            ),
        ],
    )


def _distributed_tensor(options: Options, mesh: DeviceMesh) -> Faults:
    base = _full(options, mesh)
    coordinate, source = mesh.get_coordinate(), options["src_data_rank"]
    assert coordinate is not None
    ranks = mesh.mesh

    def held(rank: int) -> Tensor:
        numbers = base + rank if options["ranks hold"] == "other numbers" else base
        return numbers.t().contiguous().t() if options["strides"] == "transposed" else numbers

    given = held(torch.distributed.get_rank()).to(mesh.device_type)
    given = nn.Parameter(given, options["requires_grad"]) if options["parameter"] else given.detach()
    given.requires_grad_(options["requires_grad"])
    arguments = _arguments(options, mesh, "device_mesh", "placements")
    with _within(options, mesh):
        result = distribute_tensor(given, src_data_rank=None if source == "none" else source, **arguments)
    layout = _layout(options, mesh)
    full = held(int(ranks[tuple(coordinate if source == "none" else [source] * mesh.ndim)]))
    if result.requires_grad != options["requires_grad"]:
        yield "requires_grad", f"{result.requires_grad}"
    if any(at.is_partial() for at in layout):
        yield from _compared("result", result.full_tensor(), full)
    else:
        yield from _compared("result", result.to_local(), shard_of(full, mesh, layout))
    if result.shape != full.shape or tuple(result.placements) != layout:
        yield "layout", f"{tuple(result.shape)} {spelled(result.placements)}"


def _argument_of_distribution(mesh: DeviceMesh) -> Interface:
    """Return the interface whose calls must leave their argument unchanged.

    See findings/distributed_tensor_overwrites_its_argument.py.
    """
    return Interface(
        "distribute_tensor, argument",
        distribute_tensor,
        values={"placements": layouts(mesh.ndim, ("S0", "R"))},
        faults=_left_in_argument,
        given=("tensor", "device_mesh", "src_data_rank"),
        conditions={"size": SIZES},
    )


def _left_in_argument(options: Options, mesh: DeviceMesh) -> Faults:
    own = integers(*shape_of(options["size"], mesh)) + torch.distributed.get_rank()
    given = own.clone()
    distribute_tensor(given, mesh, layout_of(options["placements"]))
    yield from _compared("argument", given, own)


def _pending_integers(mesh: DeviceMesh) -> Interface:
    """Return the interface of integers that become pending sums, see findings/pending_distribution_changes_dtype.py."""
    return Interface(
        "distribute_tensor, pending integers",
        distribute_tensor,
        values={"placements": layouts(mesh.ndim, ("P", "S0"))[:-1]},
        faults=_pending_of_integers,
        given=("tensor", "device_mesh", "src_data_rank"),
        conditions={"size": SIZES},
    )


def _pending_of_integers(options: Options, mesh: DeviceMesh) -> Faults:
    full = integers(*shape_of(options["size"], mesh)).long()
    result = distribute_tensor(full, mesh, layout_of(options["placements"]))
    yield from _compared("result", result.full_tensor(), full)


class _Scaled(nn.Module):
    """Linear layer with integers, and a buffer that scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        for seed, parameter in enumerate(self.parameters(), 1):
            parameter.data = integers(*parameter.shape, seed=seed)
        self.register_buffer("scale", torch.arange(8.0))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


def _by_rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the rows of a linear layer along the last dimension of the mesh."""
    if isinstance(module, nn.Linear):
        layout = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for name, parameter in [*module.named_parameters()]:
            shards = distribute_tensor(parameter.data, mesh, layout)
            module.register_parameter(name, nn.Parameter(shards, parameter.requires_grad))


def _taken(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> tuple[Tensor]:
    return (DTensor.from_local(inputs[0], mesh, run_check=False),)


def _returned(_module: nn.Module, output: Tensor, _mesh: DeviceMesh) -> Tensor:
    return cast("DTensor", output).full_tensor()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "by rows": _by_rows,
    "of module": _taken,
    "of inputs": lambda inputs, mesh: _taken(nn.Identity(), inputs, mesh),
    "of module and output": _returned,
    "of output": lambda output, mesh: _returned(nn.Identity(), output, mesh),
}


def _distribute_module() -> Interface:
    return Interface(
        "distribute_module",
        distribute_module,
        values={
            "device_mesh": ("given", OMITTED),
            "partition_fn": (OMITTED, "by rows"),
            "input_fn": (OMITTED, "of module", "of inputs"),
            "output_fn": (OMITTED, "of module and output", "of output"),
        },
        faults=_distributed_module,
        given=("module",),
        conditions={"size": SIZES, "frozen": (False, True)},
    )


def _distributed_module(options: Options, mesh: DeviceMesh) -> Faults:
    """Call the module three times, with other numbers of rows."""
    single, module = _Scaled(), _Scaled().to(mesh.device_type)
    for each in (single, module):
        each.linear.weight.requires_grad_(not options["frozen"])
    names = ("partition_fn", "input_fn", "output_fn")
    functions: dict[str, Any] = {name: _FUNCTIONS[options[name]] for name in names if options[name] != OMITTED}
    with _within(options, mesh):
        distribute_module(module, **_arguments(options, mesh, "device_mesh"), **functions)
    replicated = (Replicate(),) * mesh.ndim
    for more in range(3):
        rows = shape_of(options["size"], mesh, more)[0]
        full = integers(rows, 4, seed=more)
        expected, own = single(full), full.to(mesh.device_type)
        output = module(own if "input_fn" in functions else distributed(full, mesh, replicated))
        if isinstance(output, DTensor) == ("output_fn" in functions):
            yield "type", type(output).__name__
            return
        yield from _compared("output", output, expected)
        torch.autograd.backward(expected, varied(expected))
        seed = varied(expected)
        torch.autograd.backward(output, distributed(seed, mesh, replicated) if isinstance(output, DTensor) else seed)
    for name, parameter in module.named_parameters():
        wanted = single.get_parameter(name)
        if (parameter.grad is None) != (wanted.grad is None) or parameter.requires_grad != wanted.requires_grad:
            yield "frozen", name
        elif parameter.grad is not None and wanted.grad is not None:
            yield from _compared("gradient", parameter.grad, wanted.grad)


# Factories


def _factories(mesh: DeviceMesh) -> Iterator[Interface]:
    for name in ("zeros", "ones", "empty", "full", "rand", "randn"):
        function = getattr(dtensors, name)
        yield Interface(
            name,
            function,
            values={
                "size": ("as a tuple", "as a list", "as a shape", "as one number" if name == "full" else "as numbers"),
                "dtype": (OMITTED, "fp64", "bf16", *(() if "rand" in name else ("int64",))),
                "requires_grad": (False, True),
                "device_mesh": ("given", OMITTED),
                "placements": (OMITTED, *layouts(mesh.ndim, ("R", "S0", "S1"))),
            },
            faults=partial(_made, name, function),
            given=("fill_value", "layout"),  # no other layout than strided is possible
            conditions={"sizes": SIZES},
            rules=[
                forbids("dtype", "requires_grad", when=lambda dtype, requires: dtype == "int64" and requires),
                forbids("size", "placements", when=lambda size, at: size == "as one number" and "S1" in at),
            ],
        )


def _made(name: str, function: Callable[..., DTensor], options: Options, mesh: DeviceMesh) -> Faults:
    shape: tuple[int, ...] = shape_of(options["sizes"], mesh)
    if options["size"] == "as one number":
        shape = shape[:1]
    spelled_out: dict[str, Sequence[Any]] = {
        "as a tuple": [shape],
        "as a list": [list(shape)],
        "as a shape": [torch.Size(shape)],
        "as numbers": shape,
        "as one number": shape,
    }
    arguments = _arguments(options, mesh, "device_mesh", "dtype", "requires_grad", "placements")
    with _within(options, mesh):
        made = function(*spelled_out[options["size"]], *([3.0] if name == "full" else []), **arguments)
    layout = _layout(options, mesh)
    if made.requires_grad != options["requires_grad"]:
        yield "requires_grad", f"{made.requires_grad}"
    filled = {"zeros": 0, "ones": 1, "full": 3}
    if name in filled:
        dtype = DTYPES.get(options["dtype"]) or torch.get_default_dtype()
        yield from _compared("result", made.detach(), torch.full(shape, filled[name], dtype=dtype), layout)
        return
    own = shard_of(torch.empty(shape), mesh, layout)
    if made.shape != shape or made.to_local().shape != own.shape or tuple(made.placements) != layout:
        yield "layout", f"{tuple(made.to_local().shape)} of {tuple(made.shape)} {spelled(made.placements)}"
