"""Options of loss scaling and of clipping, any three together, on sharded gradients, compared with one process.

Gradients are laid out as full tensors say, so that no backward is needed. Those of loss scaling are integers times
powers of two, which no scale rounds.
"""

import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import Options, forbids
from conformance.sweeps.interface_sweep import (
    DTYPES,
    OMITTED,
    SIZES,
    Faults,
    Interface,
    layout_of,
    shape_of,
    swept_interfaces,
)
from conformance.sweeps.layouts import Layout, difference, distributed, integers
from conformance.sweeps.trials import Swept, Trials

Place = Callable[[Tensor, Layout], Tensor]
"""Function that lays a full tensor out; in one process it stays as it is."""

_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "rows": ("S0", "S0"),
    "columns and rows": ("S1", "S0"),
    "rows and replicas": ("S0", "R"),
    "replicas and rows": ("R", "S0"),
}
"""Layouts of a matrix and a vector along the last dimension of a mesh, by the names that options have."""


def _layouts(options: Options, mesh: DeviceMesh) -> Sequence[Layout]:
    return [(*[Replicate()] * (mesh.ndim - 1), *layout_of(text)) for text in _LAYOUTS[options["layouts"]]]


def _shapes(options: Options, mesh: DeviceMesh) -> Sequence[tuple[int, ...]]:
    rows, columns = shape_of(options["size"], mesh)
    return [(rows, columns), (rows,)]


def _compared(sharded: Mapping[str, Tensor], single: Mapping[str, Tensor], bound: float) -> Faults:
    """Yield the tensors of this rank that are not those of one process."""
    if sharded.keys() != single.keys():
        yield "kind", f"{sorted(sharded)}, expected {sorted(single)}"
        return
    for name, expected in single.items():
        if text := difference(sharded[name], expected, bound=bound):
            yield name.partition(" ")[0], f"{name}: {text}"


# Loss scaling


_STEPS, _OVERFLOWING = 4, 1
"""Number of steps, and the one in which a gradient overflows."""
_SCALES: Mapping[str, float | None] = {"by itself": None, "to a number": 16.0, "to a tensor": 16.0}
"""New scales that `update` is given, by the names that options have."""
_GETTERS: Mapping[str, Callable[[GradScaler], float]] = {
    "growth_factor": GradScaler.get_growth_factor,
    "backoff_factor": GradScaler.get_backoff_factor,
    "growth_interval": GradScaler.get_growth_interval,
}
"""Methods that return a parameter of a scaler, by its name."""
_ADAM_BOUND = 2.0**-18
"""Bound on the relative deviation of fused steps: kernels of vectors and of single elements may round differently.

In each of four steps at most 2**4 operators do, by 2**-24 each.
"""


@experiment(needs=Needs.NOTHING, takes_share=True)
def scaler_sweep(rank: RankWorld) -> Swept:
    """Take steps with any three options of GradScaler together."""
    return swept_interfaces(_scalers(), rank, Trials(rank.mesh), strength=3)


def _scalers() -> Iterator[Interface]:
    conditions: dict[str, tuple[Any, ...]] = {
        "layouts": ("rows", "columns and rows", "rows and replicas"),
        "size": SIZES,
        "overflow": ("none", "inf", "nan"),
        "optimizer": ("SGD", "fused Adam", "fused SGD", "fused Adagrad"),
        "optimizers": ("one", "two"),
        "outputs": ("tensor", "list", "tuple of lists", "generator"),
        "without gradient": ("none", "the first"),
        "unscale_": (False, True),
        "update": tuple(_SCALES),
        "factors": ("given", "set"),
        "restored": ("never", "into a new scaler", "into a used scaler", "by pickle"),
    }
    yield Interface(
        "GradScaler",
        GradScaler,
        values={
            "init_scale": (2.0**16, 8.0),
            "growth_factor": (2.0, 4.0),
            "backoff_factor": (0.5, 0.25),
            "growth_interval": (2000, 1),
        },
        faults=_scaled,
        given=("device",),
        conditions=conditions,
        # Documented: an optimizer that steps needs a gradient.
        rules=[forbids("without gradient", "optimizers", when=lambda lacking, n: lacking != "none" and n == "two")],
    )
    # See findings/overflow_behind_replicated_gradient.py.
    yield Interface(
        "GradScaler, first gradient replicated",
        GradScaler,
        values={"enabled": (True,)},
        faults=_scaled,
        given=("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval"),
        conditions={
            **{name: values[:1] for name, values in conditions.items()},
            "layouts": ("replicas and rows",),
            "overflow": ("inf", "nan"),
            "size": ("even", "uneven"),
        },
    )


def _scaled(options: Options, mesh: DeviceMesh) -> Faults:
    shapes, layouts = _shapes(options, mesh), _layouts(options, mesh)
    single = _stepped(options, shapes, layouts, lambda x, _layout: x, "cpu")
    sharded = _stepped(options, shapes, layouts, lambda x, at: distributed(x, mesh, at), mesh.device_type)
    yield from _compared(sharded, single, 0.0 if options["optimizer"] == "SGD" else _ADAM_BOUND)
    given = torch.tensor([float(options[name]) for name in _GETTERS if name in options])
    if options["enabled"] and len(given) and not torch.equal(sharded["factors"], given):
        yield "factors", f"{sharded['factors'].tolist()}, expected {given.tolist()}"


def _stepped(
    options: Options, shapes: Sequence[tuple[int, ...]], layouts: Sequence[Layout], place: Place, device: str
) -> dict[str, Tensor]:
    """Return the scale and the count of steps after each step, and the parameters after all."""
    parameters = [
        nn.Parameter(place(integers(*shape, seed=seed), at))
        for seed, (shape, at) in enumerate(zip(shapes, layouts, strict=True))
    ]
    groups = [parameters] if options["optimizers"] == "one" else [[each] for each in parameters]
    optimizers = [_optimizer(options, group) for group in groups]
    scaler, seen = _made(options, device), dict[str, Tensor]()
    for step in range(_STEPS):
        scale = _scale_of(scaler, options, device)
        for seed, (parameter, at) in enumerate(zip(parameters, layouts, strict=True)):
            gradient = integers(*parameter.shape, seed=2 * step + seed)
            if step == _OVERFLOWING and options["overflow"] != "none" and parameter is parameters[-1]:
                gradient[-1] = float(options["overflow"])
            parameter.grad = place(gradient * scale, at)
        if options["without gradient"] == "the first":
            parameters[0].grad = None
        for optimizer in optimizers:
            if options["unscale_"]:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        new_scale = _SCALES[options["update"]]
        scaler.update(torch.tensor(new_scale, device=device) if options["update"] == "to a tensor" else new_scale)
        scaler = _restored(scaler, options, device)
        seen[f"scale after step {step}"] = torch.tensor(scaler.get_scale())
        seen[f"state after step {step}"] = torch.tensor([*scaler.state_dict().values()])
    if options["enabled"]:
        seen["factors"] = torch.tensor([get(scaler) for get in _GETTERS.values()])
    return seen | {f"parameter {index}": parameter.detach() for index, parameter in enumerate(parameters)}


def _optimizer(options: Options, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    match options["optimizer"]:
        case "SGD":
            return torch.optim.SGD(parameters, lr=0.5)
        case "fused SGD":
            return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, fused=True)
        case "fused Adagrad":
            return torch.optim.Adagrad(parameters, lr=0.5, fused=True)
    return torch.optim.Adam(parameters, lr=0.5, fused=True)


def _made(options: Options, device: str) -> GradScaler:
    """Return a scaler whose factors are given or set."""
    names = [name for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval") if name in options]
    given = {name: options[name] for name in names}
    if options["factors"] == "given" or not options["enabled"]:
        return GradScaler(device, **given, enabled=options["enabled"])
    scaler = GradScaler(device, init_scale=given["init_scale"])
    scaler.set_growth_factor(given["growth_factor"])
    scaler.set_backoff_factor(given["backoff_factor"])
    scaler.set_growth_interval(given["growth_interval"])
    return scaler


def _scale_of(scaler: GradScaler, options: Options, device: str) -> float:
    """Return the number by which the scaler multiplies the outputs of a model."""
    one = torch.ones((), device=device)
    outputs: dict[str, Any] = {
        "tensor": one,
        "list": [one, one],
        "tuple of lists": ([one], [one, one]),
        "generator": (each for each in (one, one)),
    }
    scaled: Any = scaler.scale(outputs[options["outputs"]])
    while not isinstance(scaled, Tensor):
        scaled = [*scaled][-1]
    return float(scaled)


def _restored(scaler: GradScaler, options: Options, device: str) -> GradScaler:
    """Return the scaler, or one that goes on from its state."""
    match options["restored"]:
        case "never":
            return scaler
        case "by pickle":
            unpickled: GradScaler = pickle.loads(pickle.dumps(scaler))
            return unpickled
    other = GradScaler(device, init_scale=2.0, enabled=options["enabled"])
    if options["restored"] == "into a used scaler":
        other.scale(torch.ones((), device=device))
    other.load_state_dict(scaler.state_dict())
    return other


# Clipping


_MAX_NORMS = (0.5, 1000.0)
_CLIP_BOUNDS: Mapping[str, float] = {"fp32": 2.0**-16, "bf16": 2.0**-6, "mixed": 2.0**-6}
"""Bounds on the deviation of norms and clipped gradients, by dtype.

A norm of 2**6 numbers, a quotient and a product round at most 2**7 times, by 2**-24 each. In bf16 the norm of each
tensor, their norm and each product round once more, by 2**-9, and the quotient does by the sum of these.
"""


@experiment(needs=Needs.NOTHING, takes_share=True)
def clip_sweep(rank: RankWorld) -> Swept:
    """Clip with any three options together."""
    return swept_interfaces(_clippings(), rank, Trials(rank.mesh), strength=3)


def _clippings() -> Iterator[Interface]:
    conditions: dict[str, tuple[Any, ...]] = {
        "layouts": tuple(_LAYOUTS),
        "size": ("even", "uneven"),
        "dtype": ("fp32", "bf16", "mixed"),
        "given as": ("list", "generator", "one tensor"),
        "without gradient": ("none", "the last", "all"),
    }
    yield Interface(
        "clip_grad_norm_",
        clip_grad_norm_,
        values={
            "max_norm": _MAX_NORMS,
            "norm_type": (2.0, 1.0, 3.0, math.inf),
            "foreach": (OMITTED, True, False),
        },
        faults=partial(_clipped, call=_by_norm),
        given=("parameters",),
        conditions=conditions | {"called": ("at once", "in two calls", "by its old name")},
        # `get_total_norm` takes tensors.
        rules=[
            forbids("called", "without gradient", when=lambda called, lacking: "two" in called and lacking == "all")
        ],
    )
    yield Interface(
        "clip_grad_value_",
        clip_grad_value_,
        values={"clip_value": (1.0, 3.0), "foreach": (OMITTED, True, False)},
        faults=partial(_clipped, call=_by_value),
        given=("parameters",),
        conditions=conditions,
        # It refuses plain parameters without any gradient, too.
        rules=[forbids("without gradient", when=lambda lacking: lacking == "all")],
    )


Clip = Callable[[Any, Options, Mapping[str, Any]], dict[str, Tensor]]
"""Function of the parameters, the options and the arguments of a call; it returns the result."""


def _clipped(options: Options, mesh: DeviceMesh, *, call: Clip) -> Faults:
    shapes, layouts = _shapes(options, mesh), _layouts(options, mesh)
    single = _clipped_by(call, options, shapes, layouts, lambda x, _layout: x)
    sharded = _clipped_by(call, options, shapes, layouts, lambda x, at: distributed(x, mesh, at))
    yield from _compared(sharded, single, _CLIP_BOUNDS[options["dtype"]])


def _clipped_by(
    call: Clip, options: Options, shapes: Sequence[tuple[int, ...]], layouts: Sequence[Layout], place: Place
) -> dict[str, Tensor]:
    """Return the result of a call, and the gradients after it."""
    dtypes = {"mixed": (torch.float32, torch.bfloat16)}.get(options["dtype"], (DTYPES.get(options["dtype"]),) * 2)
    parameters = [
        nn.Parameter(place(torch.zeros(shape, dtype=dtype), at))
        for shape, at, dtype in zip(shapes, layouts, dtypes, strict=True)
    ]
    for seed, (parameter, at) in enumerate(zip(parameters, layouts, strict=True)):
        parameter.grad = place(integers(*parameter.shape, low=-4, high=4, seed=seed).to(parameter.dtype), at)
    for parameter in {"none": [], "the last": parameters[1:], "all": parameters}[options["without gradient"]]:
        parameter.grad = None
    given: dict[str, Any] = {
        "list": parameters,
        "generator": (each for each in parameters),
        "one tensor": parameters[0],
    }
    names = ("max_norm", "norm_type", "error_if_nonfinite", "clip_value", "foreach")
    values = {name: options[name] for name in names if options.get(name, OMITTED) != OMITTED}
    seen = call(given[options["given as"]], options, values)
    return seen | {f"gradient {index}": each.grad for index, each in enumerate(parameters) if each.grad is not None}


def _by_norm(parameters: Any, options: Options, values: Mapping[str, Any]) -> dict[str, Tensor]:
    if options["called"] == "at once":
        norm = clip_grad_norm_(parameters, **values)
    elif options["called"] == "by its old name":
        with warnings.catch_warnings(action="ignore"):
            norm = clip_grad.clip_grad_norm(parameters, **values)
    else:
        every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        gradients: Any = [each.grad for each in every if each.grad is not None]
        if isinstance(parameters, Tensor):
            gradients = parameters.grad
        max_norm = values["max_norm"]
        norm = get_total_norm(gradients, **{name: value for name, value in values.items() if name != "max_norm"})
        given = parameters if isinstance(parameters, Tensor) else every
        clip_grads_with_norm_(given, max_norm, norm, foreach=values.get("foreach"))
    return {"norm": full(norm)}


def _by_value(parameters: Any, _options: Options, values: Mapping[str, Any]) -> dict[str, Tensor]:
    clip_grad_value_(parameters, **values)
    return {}
