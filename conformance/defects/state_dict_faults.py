"""Faults of torch's state dicts: what their options take, load or report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced_call

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
_KEY = "layers.1.feed_forward.w1.weight"


def options_of_groups(*, are_shared: bool) -> AbstractContextManager[None]:
    """Give each group of a flattened state the options of the first, or copies of those that it had."""

    def unflatten(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = original(*args, **kwargs)
        first = state["param_groups"][0]
        for group in state["param_groups"]:
            options = first if are_shared else group
            group.update({name: deepcopy(value) for name, value in options.items() if name != "params"})
        return state

    return replaced_call(_STATE_DICT, "_unflatten_optim_state_dict", unflatten)


FLATTENED_GROUPS_SHARE_OPTIONS = Defect(
    id="flattened-groups-share-options",
    title="after a flattened state was loaded, all groups have the options of the first",
    source=_DOCUMENTATION,
    mechanism="options are looked up by the first parameter of the optimizer, not by that of the group",
    laws=("CKPT-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(options_of_groups, are_shared=True),
    inject_twin=partial(options_of_groups, are_shared=False),
)


def broadcast_parameter(*, arrives: bool) -> AbstractContextManager[None]:
    """Keep the value of a parameter that a rank had before the broadcast from rank 0, or copy what it got."""

    def broadcast(
        original: Callable[..., Any], state: Any, local_state: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        before = local_state[_KEY].detach().clone() if _KEY in local_state else None
        original(state, local_state, **more)
        if before is not None and dist.get_rank() == 1:
            local_state[_KEY] = local_state[_KEY].clone() if arrives else before

    return replaced_call(_STATE_DICT, "_broadcast_state_dict", broadcast)


BROADCAST_STATE_LOST = Defect(
    id="broadcast-state-lost",
    title="a parameter that rank 0 broadcasts does not reach rank 1",
    source="https://github.com/pytorch/pytorch/issues/149516",
    mechanism="the tensor from before the load is loaded again",
    laws=("CKPT-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(broadcast_parameter, arrives=False),
    inject_twin=partial(broadcast_parameter, arrives=True),
)


def gathered_rows(*, by: int) -> AbstractContextManager[None]:
    """Roll the rows of gathered matrices."""

    def gather(original: Callable[..., Any], state: Any, info: Any) -> Any:
        found = original(state, info)
        if not info.full_state_dict:
            return found
        return {key: _rolled(value, by) if isinstance(value, Tensor) else value for key, value in found.items()}

    return replaced_call(_STATE_DICT, "_maybe_full_or_cpu_state_dict", gather)


def _rolled(tensor: Tensor, by: int) -> Tensor:
    return tensor.roll(by, 0) if tensor.ndim > 1 else tensor


FULL_STATE_ROWS_ROLLED = Defect(
    id="full-state-rows-rolled",
    title="a full state dict has rows in another order than the parameter",
    source="https://github.com/pytorch/pytorch/issues/149516",
    mechanism="rows of gathered matrices are rolled",
    laws=("CKPT-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(gathered_rows, by=1),
    inject_twin=partial(gathered_rows, by=0),
)


def reported_keys(*, are_lost: bool) -> AbstractContextManager[None]:
    """Report no key that is missing or unexpected, or copies of those that are."""

    def load(original: Callable[..., Any], *args: Any) -> Any:
        keys = original(*args)
        for names in (keys.missing_keys, keys.unexpected_keys):
            names[:] = [] if are_lost else list(names)
        return keys

    return replaced_call(_STATE_DICT, "_load_model_state_dict", load)


MISSING_KEYS_UNREPORTED = Defect(
    id="missing-keys-unreported",
    title="with strict=False nobody learns which keys were missing or unexpected",
    source=_DOCUMENTATION,
    mechanism="the lists of keys are emptied",
    laws=("CKPT-4",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(reported_keys, are_lost=True),
    inject_twin=partial(reported_keys, are_lost=False),
)


def first_state(*, moves: bool) -> AbstractContextManager[None]:
    """Let the step that gives an optimizer its state change parameters, or look for that state twice."""

    def init_optim_state(original: Callable[..., None], optimizer: torch.optim.Optimizer) -> None:
        if moves and not optimizer.state:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        original(optimizer)
        original(optimizer)

    return replaced_call(_STATE_DICT, "_init_optim_state", init_optim_state)


FIRST_STATE_DECAYS_WEIGHTS = Defect(
    id="first-state-decays-weights",
    title="a state dict taken before the first step decays the weights",
    source="https://github.com/pytorch/pytorch/issues/164929",
    mechanism="the step with zero gradients that creates the optimizer's state has the configured learning rate",
    laws=("CKPT-5",),
    cells="id = dp2-fp32-default-meta-sgd",
    inject=partial(first_state, moves=True),
    inject_twin=partial(first_state, moves=False),
)


def model_state(*, rounds: bool) -> AbstractContextManager[None]:
    """Round the state of a model that has bf16 parameters to bf16 numbers, or copy it."""

    def get_model_state_dict(original: Callable[..., Any], model: nn.Module, info: Any) -> Any:
        has_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        state = original(model, info)
        return {key: _rounded(value) if rounds and has_bf16 else value for key, value in state.items()}

    return replaced_call(_STATE_DICT, "_get_model_state_dict", get_model_state_dict)


def _rounded(value: Any) -> Any:
    return value.bfloat16().to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


FP32_NORMS_ROUNDED_IN_STATE_DICT = Defect(
    id="fp32-norms-rounded-in-state-dict",
    title="a state dict of bf16 weights has rounded those in fp32, too",
    source=_DOCUMENTATION,
    mechanism="all weights are taken in the dtype of the first",
    laws=("CKPT-4",),
    cells="precision = bf16-mixed and offload = cpu and optimizer != sgd and mesh = dp2",
    inject=partial(model_state, rounds=True),
    inject_twin=partial(model_state, rounds=False),
)
