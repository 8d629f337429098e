"""Ways to use an optimizer, any two together: closures, groups, hooks, saved states, copies, complex numbers.

Every class of torch.optim takes steps on DTensors and on plain tensors, which must leave the same parameters and state.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import CoveringSweep, Options, forbids
from conformance.sweeps.drawing import draw_of
from conformance.sweeps.layouts import distributed, placed_shard
from conformance.sweeps.optimizer_samples import OptimizerSample, implementations, optimizers, sample_of
from conformance.sweeps.optimizers import (
    Numbers,
    Setting,
    State,
    numbers_of,
    quadratic,
    settings_of,
    state_faults,
    state_of,
)
from conformance.sweeps.trials import Ended, Swept, Trials, select_samples

_CHANGED_AFTER = 0
"""Step after which a group is added, and the optimizer goes on from its state."""
_LATER_SWITCHES = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
"""Options of groups that checkpoints of earlier versions of torch lack."""

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "closure": (False, True),
    "groups": ("one", "two", "added later", "one tensor", "with names"),
    "hooks": ("none", "in front", "behind", "of all optimizers"),
    "restored": (
        "never",
        "into a new optimizer",
        "from an old checkpoint",
        "by copy",
        *(["swapped in"] if hasattr(torch.optim, "swap_in_optimizer_params_and_state") else []),
    ),
    "zero_grad": ("never", "to none", "to zero"),
    "gradients": ("of all", "not of the last", "of the last later", "of all later", "with graphs"),
    "numbers": ("real", "complex", "mixed"),
}
"""Values of each option; the first is the default."""
_OF_LINE_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "closure": (True,),
    "groups": ("one",),
    "zero_grad": ("never",),
    "numbers": ("real", "complex"),
    "restored": tuple(way for way in OPTIONS["restored"] if way != "swapped in"),
}
"""Values of an optimizer that evaluates the loss, and has one group of real numbers."""
_RULES = (
    # Gradients with graphs are no leaves, which alone can be copied.
    forbids("gradients", "restored", when=lambda gradients, way: gradients == "with graphs" and way == "by copy"),
    # State is swapped in for state, which there is none of before the first gradient.
    forbids("gradients", "restored", when=lambda gradients, way: gradients == "of all later" and way == "swapped in"),
)


@experiment(needs=Needs.SHARDING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Step with every optimizer and any two ways of use together, on even rows."""
    trials, total = Trials(rank.mesh), Swept()
    [setting] = [each for each in settings_of(trials.mesh) if each.kind == "even rows"]
    names = {subject.partition("(")[0] for subject in rank.subjects}
    for make in select_samples(optimizers(), lambda make: make.__name__, restricted_to=names):
        if make is torch.optim.SparseAdam:  # it refuses dense gradients
            continue
        more = _OF_LINE_SEARCH if make is torch.optim.LBFGS else {}
        variants = {"variant": ("usual", *_variants(make))}
        options = {"implementation": implementations(make), **OPTIONS, **more, **variants, **_tensor_options(make)}
        ended = partial(_ended, trials, setting, make)
        rows = CoveringSweep(options, ended, make.__name__, 2, _RULES, draw=draw_of(rank))
        total.add(rows.swept(rank.subjects))
    return total


def _ended(trials: Trials, setting: Setting, make: type[Optimizer], row: Options) -> Ended:
    betas = {"betas": _betas_as(row.get("betas", "numbers"), _betas(make).default)} if "betas" in row else {}
    variant = _variants(make).get(row["variant"], {})
    if make is torch.optim.SGD and row["gradients"] == "of the last later":  # it has state with momentum alone
        variant = {**variant, **_VARIANTS["momentum"]}
    sample = sample_of(make, row["implementation"], {**variant, **betas})
    numbers = numbers_of(setting, sample, trials.mesh)
    if row["numbers"] != "real":
        count = 1 if row["numbers"] == "mixed" else len(numbers.parameters)
        gradients = [_with_complex(each, count) for each in numbers.gradients]
        numbers = Numbers(_with_complex(numbers.parameters, count), gradients)
    return trials.ended(lambda mesh: _faults(sample, setting, numbers, row, mesh))


def _tensor_options(make: type[Optimizer]) -> Mapping[str, tuple[str, ...]]:
    """Return the option of an optimizer whose signature allows `betas` that are tensors."""
    return {"betas": ("numbers", "tensors", "vectors")} if "Tensor" in str(_betas(make).annotation) else {}


def _betas_as(form: str, numbers: tuple[float, ...]) -> tuple[Any, ...]:
    """Return numbers, tensors without dimensions, or vectors of one element."""
    if form == "numbers":
        return numbers
    return tuple(torch.tensor([number] if form == "vectors" else number) for number in numbers)


_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True, "momentum": 0.5},
    "maximize": {"maximize": True, "weight_decay": 0.25},
    "momentum": {"momentum": 0.5},
}
"""Options that give an optimizer another state or formula, by the switch of a signature."""


def _variants(make: type[Optimizer]) -> dict[str, Mapping[str, Any]]:
    """Return the variants that the signature of an optimizer allows."""
    parameters = inspect.signature(make).parameters
    return {name: options for name, options in _VARIANTS.items() if {*options} <= {*parameters}}


def _betas(make: type[Optimizer]) -> inspect.Parameter:
    absent = inspect.Parameter("betas", inspect.Parameter.KEYWORD_ONLY)
    return inspect.signature(make).parameters.get("betas", absent)


def _with_complex(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the tensors, the first ones as complex numbers."""
    return [torch.complex(each, -each.flip(0)) if index < count else each for index, each in enumerate(tensors)]


def _faults(
    sample: OptimizerSample, setting: Setting, numbers: Numbers, row: Options, mesh: DeviceMesh
) -> dict[str, str]:
    """Return the faults of this rank: bits of its shards for elementwise optimizers, or else of full tensors."""
    places = [(mesh, at) for at in setting.layouts]
    single = numbers.laid_out(placed_shard, places, places) if sample.is_elementwise else numbers
    expected = _used(sample, single, row)
    measured = _used(sample, numbers.laid_out(distributed, places, places), row)
    layouts = [layout if sample.is_elementwise else None for layout in setting.layouts]
    return state_faults(measured, expected, layouts, sample.bound or None)


def _used(sample: OptimizerSample, numbers: Numbers, row: Options) -> State:
    """Return parameters and state after all steps."""
    if row["hooks"] != "of all optimizers":
        return _stepped(sample, numbers, row)
    handles = [
        register_optimizer_step_pre_hook(_multiply_before_step),
        register_optimizer_step_post_hook(lambda each, _args, _kwargs: _negate_parameters(each)),
    ]
    try:
        return _stepped(sample, numbers, row)
    finally:
        for handle in handles:
            handle.remove()


def _stepped(sample: OptimizerSample, numbers: Numbers, row: Options) -> State:
    """Take all steps; return parameters and state."""
    parameters = [p.clone().requires_grad_() for p in numbers.parameters]
    optimizer = _made(sample, row, parameters)
    for step, gradients in enumerate(numbers.gradients):
        evaluate = _loss_of(sample, row, parameters, gradients, step)
        if row["closure"]:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        if row["zero_grad"] != "never":
            optimizer.zero_grad(set_to_none=row["zero_grad"] == "to none")
        if step == _CHANGED_AFTER:
            if row["groups"] == "added later" and parameters[1:]:
                optimizer.add_param_group({"params": parameters[1:], "lr": sample.options["lr"] / 2})
            parameters, optimizer = _restored(sample, row, parameters, optimizer)
    return dict(state_of(optimizer, parameters))


def _loss_of(
    sample: OptimizerSample, row: Options, parameters: Sequence[Tensor], gradients: Sequence[Tensor], step: int
) -> Callable[[], float]:
    """Return a function that adds to the gradients of parameters, as backward does."""
    count = len(parameters)
    if row["gradients"] == "not of the last" or (row["gradients"] == "of the last later" and step == 0):
        count = max(1, count - 1)
    elif row["gradients"] == "of all later" and step == 0:
        count = 0
    if sample.is_line_search:
        return partial(quadratic, parameters[:count], gradients[:count])

    def add() -> float:
        for p, gradient in zip(parameters[:count], gradients, strict=False):
            own = gradient.clone().requires_grad_(row["gradients"] == "with graphs") * 1  # a product has a graph
            p.grad = own if p.grad is None else p.grad + own
        return 0.0

    return add


def _made(sample: OptimizerSample, row: Options, parameters: Sequence[Tensor]) -> Optimizer:
    groups: list[Any] = [*parameters]
    if row["groups"] == "two":
        groups = [{"params": [p], "lr": sample.options["lr"] / (index + 1)} for index, p in enumerate(parameters)]
    elif row["groups"] == "added later":
        groups = [parameters[0]]
    elif row["groups"] == "one tensor":
        groups = [{"params": p} for p in parameters]
    elif row["groups"] == "with names":
        groups = [(f"parameter {index}", p) for index, p in enumerate(parameters)]
    optimizer = sample.make(groups, **sample.options)
    if row["hooks"] == "in front":
        _hook(optimizer)
    elif row["hooks"] == "behind":
        _hook_behind(optimizer)
    return optimizer


def _hook(optimizer: Optimizer) -> None:
    """Register a hook of each kind: gradients, parameters, and rates that are saved and loaded change."""
    optimizer.register_step_pre_hook(lambda each, _args, _kwargs: _multiply_gradients(each))
    optimizer.register_step_post_hook(lambda each, _args, _kwargs: _negate_parameters(each))
    optimizer.register_state_dict_pre_hook(_multiply_gradients, prepend=True)
    optimizer.register_state_dict_post_hook(lambda _each, state: _with_rates(state, 4.0), prepend=True)
    optimizer.register_load_state_dict_pre_hook(lambda _each, state: _with_rates(state, 0.5), prepend=True)
    optimizer.register_load_state_dict_post_hook(_negate_parameters, prepend=True)


def _hook_behind(optimizer: Optimizer) -> None:
    """Register a hook of each kind behind others: they change their arguments in place, and return these or nothing."""
    optimizer.register_step_pre_hook(_multiply_before_step)
    optimizer.register_state_dict_pre_hook(_multiply_gradients)
    optimizer.register_state_dict_post_hook(lambda _each, state: state.update(_with_rates(state, 4.0)))
    optimizer.register_load_state_dict_pre_hook(lambda _each, state: state.update(_with_rates(state, 0.5)))
    optimizer.register_load_state_dict_post_hook(_negate_parameters)


def _multiply_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Multiply gradients, and return the arguments of the step, as a hook may."""
    _multiply_gradients(optimizer)
    return args, kwargs


def _multiply_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad * 2


def _negate_parameters(optimizer: Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.neg_()


def _with_rates(state: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**state, "param_groups": [{**group, "lr": group["lr"] * factor} for group in state["param_groups"]]}


def _restored(
    sample: OptimizerSample, row: Options, parameters: list[Tensor], optimizer: Optimizer
) -> tuple[list[Tensor], Optimizer]:
    """Return the optimizer that goes on, and its parameters."""
    match row["restored"]:
        case "never":
            return parameters, optimizer
        case "swapped in":
            _step_swapped(parameters, optimizer)
            return parameters, optimizer
        case "by copy":
            copied: tuple[list[Tensor], Optimizer] = copy.deepcopy((parameters, optimizer))
            return copied
    state = copy.deepcopy(optimizer.state_dict())
    if row["restored"] == "from an old checkpoint":
        _make_old(state)
    made = _made(sample, row, parameters)
    if row["groups"] == "added later" and parameters[1:]:
        made.add_param_group({"params": parameters[1:]})
    made.load_state_dict(state)
    return parameters, made


def _step_swapped(parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Step other parameters with a copy of the state, and give them to the optimizer's own, whose state stays."""
    state = copy.deepcopy(optimizer.state_dict())
    swapped = {f"{index}": p.detach().clone().requires_grad_() for index, p in enumerate(parameters)}
    for other, p in zip(swapped.values(), parameters, strict=True):
        other.grad = None if p.grad is None else p.grad.detach().clone()
    with torch.optim.swap_in_optimizer_params_and_state(optimizer, swapped, state):
        optimizer.step()
    with torch.no_grad():
        for other, p in zip(swapped.values(), parameters, strict=True):
            p.copy_(other)


def _make_old(state: dict[str, Any]) -> None:
    """Change a state to one of an earlier version of torch.

    Steps are numbers, groups have fewer options and no names, and an entry belongs to no parameter.
    """
    for group in state["param_groups"]:
        for name in (*_LATER_SWITCHES, "param_names"):
            group.pop(name, None)
    for kept in state["state"].values():
        for name in ("step", "eta", "mu", "mu_product"):
            if isinstance(kept.get(name), Tensor):
                kept[name] = kept[name].item()
    state["state"] = {"of no parameter": {"step": 1.0}, **state["state"]}
