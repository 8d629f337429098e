"""Faults of methods of `FSDPModule` that the reference trainer does not call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from conformance.defects.edited_source import edited
from conformance.defects.injection import Defect, replaced_call

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_MODULE, _GROUP = f"{_FULLY_SHARD}._fully_shard:FSDPModule", f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_CELL = "id = dp2-fp32-default-meta"
_RECURSIVE = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
)


@contextmanager
def recursion(*, is_forced: bool) -> Iterator[None]:
    """Set an option of all modules below, whatever the caller asks for, or hand the request on."""

    def set_option(original: Callable[..., None], module: Any, value: bool, *, recurse: bool = True) -> None:
        original(module, value, recurse=recurse or is_forced)

    with ExitStack() as stack:
        for name in _RECURSIVE:
            stack.enter_context(replaced_call(_MODULE, name, set_option))
        yield


RECURSION_NOT_ASKED_FOR = Defect(
    id="recursion-not-asked-for",
    title="with `recurse=False` options are set for all modules below, too",
    source=_DOCS,
    mechanism="the setters iterate over all modules whatever the caller asks for",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(recursion, is_forced=True),
    inject_twin=partial(recursion, is_forced=False),
)


def unused_gradients(value: float) -> AbstractContextManager[None]:
    """Add a value to the zeros that take the place of gradients of parameters that were not used."""
    zeros = "fsdp_param.unsharded_zero_grad_data"
    statement = f"unsharded_grads.append({zeros})"
    return edited(_GROUP, "post_backward", statement, into=[f"unsharded_grads.append({zeros} + {value})"])


UNUSED_GRADIENT_NOT_ZERO = Defect(
    id="unused-gradient-not-zero",
    title="ranks that do not use a parameter contribute something to its gradient",
    source=_DOCS,
    mechanism="the buffer that stands for the gradient of an unused parameter is not cleared",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(unused_gradients, 1.0),
    inject_twin=partial(unused_gradients, 0.0),
)


def reset_of_parameters(*, times: int) -> AbstractContextManager[None]:
    """Reshard parameters that many times when an iteration that failed is reset."""
    reshard = "self._to_sharded()"
    return edited(_GROUP, "_reset_iter_state", reshard, into=[reshard] * times)


RESET_LEAVES_UNSHARDED = Defect(
    id="reset-leaves-unsharded",
    title="after the reset of an iteration that failed, parameters stay unsharded",
    source=_DOCS,
    mechanism="reset_iter_state clears the state of communication and not that of parameters",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(reset_of_parameters, times=0),
    inject_twin=partial(reset_of_parameters, times=2),
)


def method_calls(name: str, *, times: int) -> AbstractContextManager[None]:
    """Do what a method does that many times."""

    def call(original: Callable[..., None], module: Any, argument: Any) -> None:
        for _ in range(times):
            original(module, argument)

    return replaced_call(_MODULE, name, call)


CUSTOM_REDUCTION_IGNORED = Defect(
    id="custom-reduction-ignored",
    title="a reduce-scatter of the user is not called",
    source=_DOCS,
    mechanism="set_custom_reduce_scatter has no effect",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(method_calls, "set_custom_reduce_scatter", times=0),
    inject_twin=partial(method_calls, "set_custom_reduce_scatter", times=2),
)

UNSHARDED_IN_BACKWARD_ANYWAY = Defect(
    id="unsharded-in-backward-anyway",
    title="a module that needs no parameters in backward gathers them",
    source=_DOCS,
    mechanism="set_unshard_in_backward has no effect",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(method_calls, "set_unshard_in_backward", times=0),
    inject_twin=partial(method_calls, "set_unshard_in_backward", times=2),
)


def last_backward(*, drops_earlier: bool) -> AbstractContextManager[None]:
    """Drop the gradients of earlier backward passes when the last one is announced, or announce it twice."""

    def set_is_last_backward(original: Callable[..., None], module: Any, is_last: bool) -> None:
        original(module, is_last)
        if is_last and drops_earlier:
            module.zero_grad()
        elif is_last:
            original(module, is_last)

    return replaced_call(_MODULE, "set_is_last_backward", set_is_last_backward)


EARLIER_BACKWARD_DROPPED = Defect(
    id="earlier-backward-dropped",
    title="gradients of backward passes that are not the last are lost",
    source=_DOCS,
    mechanism="the state of an iteration is cleared where only that of prefetching is to be",
    laws=("API-2",),
    cells=_CELL,
    inject=partial(last_backward, drops_earlier=True),
    inject_twin=partial(last_backward, drops_earlier=False),
)
