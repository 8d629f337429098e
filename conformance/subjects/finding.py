"""Model and optimizer of an owner's loop, found among those that exist when the model first computes."""

import gc
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.subjects.optimizers import members, parameters_of
from conformance.subjects.protocol import SubjectMistake, reference_name


class ModelSearch:
    """Search for the module that has the parameters of the model of one process, of which any module is called."""

    def __init__(self, names: Collection[str], aliases: Collection[str]) -> None:
        self._names, self._known = frozenset(names), frozenset([*names, *aliases])
        self._rejected: set[int] = set()
        self.sharded_others: list[str] = []
        """Classes of called modules that FSDP has sharded, and which have other parameters."""

    def named(self, name: str) -> str:
        """Return the name that a parameter has in the model of one process."""
        return reference_name(name, self._known)

    def model_of(self, called: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module | None:
        """Return the parallel model that a called module has inside or belongs to; None for another module.

        A module with the right names that is neither sharded nor held by an optimizer is another one, such as the copy
        from which the trainer makes its model; and so may be a sharded one that computes without gradients and is held
        by no optimizer, such as a moving average of the weights.
        """
        if id(called) in self._rejected:
            return None
        candidates = [module for module in called.modules() if self._fits(module)] or self._around(called)
        for module in candidates:
            if (_is_sharded(module) and torch.is_grad_enabled()) or _holders(module, optimizers):
                return module
        if any(map(_is_sharded, candidates)):
            return None
        self._rejected.add(id(called))
        if not candidates and isinstance(called, FSDPModule):
            self.sharded_others.append(type(called).__name__)
        return None

    def _fits(self, module: nn.Module) -> bool:
        names = {reference_name(name, self._known) for name, _ in module.named_parameters()}
        return self._names <= names <= self._known

    def _around(self, called: nn.Module) -> list[nn.Module]:
        """Return the modules with the right names that contain a module: a loop may call only layers of its model."""
        if not any(True for _ in called.parameters()):
            return []
        modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
        return [module for module in modules if self._fits(module) and any(called is each for each in module.modules())]


def _is_sharded(module: nn.Module) -> bool:
    shards = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return shards or any(isinstance(each, FSDPModule) for each in module.modules())


def optimizers_of(model: nn.Module, made: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of a model, of those that the loop has made so far, in the order in which they were made.

    A container of optimizers that is itself one, and holds just their parameters, does not count. Raises
    SubjectMistake, with what to do, if none is left.
    """
    holders = _distinct(_holders(model, made)) or _distinct(made)
    if not holders:
        raise SubjectMistake("no optimizer was made before the model first computes: make it earlier in the loop")
    return holders


def _holders(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    own = {id(parameter) for parameter in model.parameters()}
    return [each for each in optimizers if any(id(parameter) in own for parameter in parameters_of(each))]


def _distinct(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers without those that hold just the parameters of some earlier ones."""
    kept: dict[frozenset[int], Optimizer] = {}
    for each in optimizers:
        own = frozenset(map(id, parameters_of(each)))
        if own != frozenset().union(*(other for other in kept if other <= own)):
            kept[own] = each
    return list(kept.values())


_OF_SPEED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Options of a group of parameters that change no result, or only with an error."""


def require_same_optimizers(
    measured: Sequence[Sequence[Optimizer]], expected: Sequence[Optimizer], *, rank: int
) -> None:
    """Raise SubjectMistake, with the line to write, if the reference would train with other optimizers than a rank.

    `measured` are the optimizers of each turn, `expected` is that of each turn, which may be several as one.
    """
    declared = [members(each) for each in expected]
    if [*map(len, measured)] != [*map(len, declared)]:
        names = ", ".join(_spelled(each) for own in measured for each in own)
        raise SubjectMistake(
            f"on rank {rank} {sum(map(len, measured))} optimizers train the model ({names}), and the reference has "
            f"{sum(map(len, declared))}: let optimizer= return a list of all that step together, or declare "
            "loss={MODULE: LOSS} in the order of their steps if each has a loss of its own"
        )
    for own, others in zip(measured, declared, strict=True):
        for mine, other in zip(sorted(own, key=_kind), sorted(others, key=_kind), strict=True):
            _require_same_optimizer(mine, other, rank=rank)


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__} {_spelled(optimizer)}"


def _require_same_optimizer(measured: Optimizer, expected: Optimizer, *, rank: int) -> None:
    own, declared = [list(map(_options, each.param_groups)) for each in (measured, expected)]
    if type(measured).__name__ == type(expected).__name__ and own == declared:
        return
    changed = _changed(measured.defaults, type(measured), own[0])
    line = f"optimizer=lambda parameters: {_path(type(measured))}({', '.join(['parameters', *changed])})"
    groups = f", with {len(own)} groups of parameters" if len(own) > 1 else ""
    raise SubjectMistake(
        f"on rank {rank} the loop trains with {type(measured).__name__}({', '.join(changed)}){groups}, and the "
        f"reference with {_spelled(expected)}: give all ranks the same, or declare {line}"
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in _OF_SPEED}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _changed(defaults: Mapping[str, Any], kind: type[Optimizer], options: Mapping[str, Any]) -> list[str]:
    """Return the options, as arguments of a call, that a new optimizer of a class would not have."""
    try:
        usual: Mapping[str, Any] = kind([nn.Parameter(torch.zeros(1, 1))]).defaults  # type: ignore[call-arg]
    except (TypeError, ValueError):
        usual = {}
    return [
        f"{key}={value!r}"
        for key, value in options.items()
        if key in defaults and (key not in usual or _plain(usual[key]) != value)
    ]


def _spelled(optimizer: Optimizer) -> str:
    options = _changed(optimizer.defaults, type(optimizer), _options(optimizer.param_groups[0]))
    return f"{type(optimizer).__name__}({', '.join(options)})"


def _path(kind: type) -> str:
    module = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    return f"{module}.{kind.__name__}"
