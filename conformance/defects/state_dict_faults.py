"""Faults of torch's state dicts: what their options take, load or report."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

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
