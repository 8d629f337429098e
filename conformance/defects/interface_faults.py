"""Faults of FSDP2's interface where the reference trainer does not use it."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from conformance.defects.injection import Defect, replaced

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def ignored(*, are_forgotten: bool) -> AbstractContextManager[None]:
    """Manage the parameters that `ignored_params` names like all others, or leave them out in one more place."""

    def make(original: Any) -> Any:
        def managed_states(modules: Any, ignored_params: Any = None, *rest: Any) -> Any:
            if are_forgotten:
                return original(modules, None, *rest)
            params, *others = original(modules, ignored_params, *rest)
            return ([param for param in params if param not in (ignored_params or ())], *others)

        return managed_states

    return replaced(f"{_FULLY_SHARD}._fsdp_init", "_get_managed_states", make)


def divide_factor(*, multiplied_by: float) -> AbstractContextManager[None]:
    """Set another factor than is asked for."""

    def make(original: Any) -> Any:
        def set_gradient_divide_factor(module: Any, factor: float) -> None:
            original(module, factor * multiplied_by)

        return set_gradient_divide_factor

    return replaced(f"{_FULLY_SHARD}._fully_shard:FSDPModule", "set_gradient_divide_factor", make)


def inputs_cast(*, inside: bool) -> AbstractContextManager[None]:
    """Cast tensors that are arguments themselves, or those inside of other things as well."""

    def make(_original: Any) -> Any:
        def cast_forward_inputs(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            policy = state._mp_policy
            if not (policy.cast_forward_inputs and policy.param_dtype):
                return args, kwargs
            cast = partial(_cast, dtype=policy.param_dtype)
            if inside:
                return _pytree.tree_map(cast, (args, kwargs))
            return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

        return cast_forward_inputs

    return replaced(f"{_FULLY_SHARD}._fsdp_state:FSDPState", "_cast_forward_inputs", make)


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="ignored-parameter-managed",
        title="a parameter that was to be ignored is sharded and reduced",
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        mechanism="ignored_params does not reach the place that collects parameters",
        laws=("API-1",),
        inject=partial(ignored, are_forgotten=True),
        inject_twin=partial(ignored, are_forgotten=False),
    ),
    Defect(
        id="divide-factor-halved",
        title="gradients are divided by another factor than was set",
        source="https://github.com/pytorch/pytorch/issues/155903",
        mechanism="the factor of one's own counts other ranks than are summed over",
        laws=("API-2",),
        inject=partial(divide_factor, multiplied_by=0.5),
        inject_twin=partial(divide_factor, multiplied_by=1.0),
    ),
    Defect(
        id="inputs-inside-not-cast",
        title="inputs inside of lists and tables stay in fp32",
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        mechanism="cast_forward_inputs looks at the arguments themselves and not into them",
        laws=("MP-6",),
        inject=partial(inputs_cast, inside=False),
        inject_twin=partial(inputs_cast, inside=True),
    ),
)
