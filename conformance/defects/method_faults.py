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


def group_completion(remove: str) -> AbstractContextManager[None]:
    """Take modules off the list of those that the group still waits for by another method of sets."""
    statement = "modules_to_run.remove(module)"
    hooks = "_register_group_forward_hooks"
    return edited(f"{_FULLY_SHARD}._fsdp_state", hooks, statement, into=[f"modules_to_run.{remove}"])


GROUP_RESHARDED_AFTER_FIRST = Defect(
    id="group-resharded-after-first",
    title="modules that are sharded together are resharded after the first of them, and gathered again",
    source=_DOCS,
    mechanism="the group does not wait for the forward pass of its last module",
    laws=("API-1",),
    cells=_CELL,
    inject=partial(group_completion, "clear()"),
    inject_twin=partial(group_completion, "discard(module)"),
)


def shared_streams(*, first_alone: bool) -> AbstractContextManager[None]:
    """Reduce gradients of the first of the modules that share their streams alone, or share the streams twice."""

    def share_comm_ctx(original: Callable[..., None], modules: Any) -> None:
        original(modules)
        original(modules)
        for module in modules[1:]:
            module.set_requires_gradient_sync(not first_alone)

    return replaced_call("torch.distributed.fsdp", "share_comm_ctx", share_comm_ctx)


SHARED_STREAMS_OF_FIRST_ALONE = Defect(
    id="shared-streams-of-first-alone",
    title="of the modules that share their streams only the first one's gradients are reduced",
    source=_DOCS,
    mechanism="the state of the reduction is replaced with the streams",
    laws=("API-1",),
    cells=_CELL,
    inject=partial(shared_streams, first_alone=True),
    inject_twin=partial(shared_streams, first_alone=False),
)
