"""Faults of buffers: reused while an operator still reads or writes them, or read before they are filled.

On a device nothing but a reference, or an event that is waited for, keeps the allocator from reusing memory that
another stream uses. The CPU has no streams: there the defects of the substrate "gloo" do manually what streams would
do. The result of an all-reduce that was issued with a delay leaves its buffer later, and a copy to the host runs when
the next group is reduced.
The defects of `CUDA` remove what torch does against reuse, and have not been seen on a device yet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.delays import DELAY_S
from conformance.plan.substrates import STREAMS

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_ALIASED = "https://github.com/pytorch/pytorch/pull/180889"
_COPY_RACE = "https://github.com/pytorch/pytorch/pull/180665"
_WRONG_EVENT = "https://github.com/pytorch/pytorch/pull/160481"


class _Blocks:
    """Allocator that takes a block back at once, and returns the same block for each request like the last."""

    def __init__(self, *, reused: bool) -> None:
        self._reused = reused
        self._free: dict[tuple[Any, ...], Tensor] = {}

    def filled_with(self, values: Tensor, *, slot: int = 0) -> Tensor:
        """Return a block with these values; blocks that are used at the same time have different slots."""
        key = (slot, values.dtype)
        block = self._free.get(key) if self._reused else None
        if block is None or block.numel() < values.numel():
            self._free[key] = block = torch.empty(values.numel(), dtype=values.dtype)
        return block[: values.numel()].view(values.shape).copy_(values)


def before_the_end_of_backward(act: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Call `act(group)` for each group before it waits for the operators that backward has issued."""

    def finalize_backward(original: Callable[[Any], None], group: Any) -> None:
        act(group)
        original(group)

    return replaced_call(f"{_GROUP}:FSDPParamGroup", "finalize_backward", finalize_backward)


@contextmanager
def delayed_all_reduce(*, reused: bool) -> Iterator[None]:
    """All-reduce each group over replicas in the block that the last group had, or in a block of its own.

    The result is copied into the gradients at once, as by a stream that keeps up; that of an all-reduce that was issued
    with a delay, only when the next group is in its block, or at the end of backward. Delayed is what `delays` delays,
    and not what waits for a peer, so that the delays of STREAM-5 decide what is wrong, and not the load of the machine.
    This covers fp32 without accumulation, where nothing else reads gradients before.
    """
    under_way: list[tuple[Tensor, Tensor]] = []
    blocks = _Blocks(reused=reused)

    def finish() -> None:
        while under_way:
            gradients, block = under_way.pop()
            gradients.copy_(block)

    def all_reduce(original: Callable[..., Any], tensor: Tensor, **options: Any) -> Any:
        if tensor.dtype != torch.float32:
            return original(tensor, **options)
        block = blocks.filled_with(tensor)
        finish()
        start_s = time.perf_counter()
        work = original(block, **options, async_op=True)
        is_delayed = time.perf_counter() - start_s >= DELAY_S
        work.wait()
        under_way.append((tensor, block))
        return None if is_delayed else finish()

    def foreach_reduce(original: Callable[..., Any], fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        if any(param.sharded_param.grad is not None for param in fsdp_params):
            return original(fsdp_params, *args, **kwargs)
        with replaced_call("torch.distributed", "all_reduce", all_reduce):
            return original(fsdp_params, *args, **kwargs)

    with (
        replaced_call(_GROUP, "foreach_reduce", foreach_reduce),
        before_the_end_of_backward(lambda _: finish()),
    ):
        yield


ALL_REDUCE_BUFFER_REUSED = Defect(
    id="all-reduce-buffer-reused",
    title="groups are reduced over replicas in one buffer, while the last one may be under way",
    source=_ALIASED,
    mechanism="the buffer is free as soon as the host has issued its all-reduce, and is read with a delay",
    laws=("STREAM-5",),
    cells="id = hsdp2x2-fp32-default-meta",
    inject=partial(delayed_all_reduce, reused=True),
    inject_twin=partial(delayed_all_reduce, reused=False),
    substrates=("gloo",),
)


def all_reduced_buffers(*, dropped: bool, offloaded: bool) -> AbstractContextManager[None]:
    """Drop a group's reference to the buffer of its all-reduce: while that may be under way, or after waiting for it.

    Concerns the groups that are offloaded, or those that are not. The stream that waits is that of backward, for which
    the next reduction waits.
    """

    def post_backward(original: Callable[..., None], group: Any, *unused: Any) -> None:
        original(group, *unused)
        if group._all_reduce_state is None or group.fsdp_params[0].offload_to_cpu != offloaded:
            return
        if not dropped and group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)
        group._all_reduce_state = None

    return replaced_call(f"{_GROUP}:FSDPParamGroup", "post_backward", post_backward)


ALL_REDUCE_BUFFER_RELEASED = Defect(
    id="all-reduce-buffer-released",
    title="the buffer of an all-reduce over replicas is reused while the all-reduce is under way",
    source=_ALIASED,
    mechanism="the group does not keep the buffer in reduce_dtype until its all-reduce and cast have ended",
    laws=("STREAM-5", "STREAM-6"),
    cells="id = hsdp2x2-bf16reduce-default-meta",
    inject=partial(all_reduced_buffers, dropped=True, offloaded=False),
    inject_twin=partial(all_reduced_buffers, dropped=False, offloaded=False),
    substrates=STREAMS,
)


@contextmanager
def delayed_copies_to_host(*, reused: bool, awaited: bool) -> Iterator[None]:
    """Copy each group's gradients to the host when the next group has been reduced, the last ones at the end.

    The source is a block that the next group has as well if it is `reused`. Not `awaited`, the last copies are never
    made.
    """
    blocks = _Blocks(reused=reused)
    under_way: list[tuple[Tensor, Tensor]] = []

    def finish() -> None:
        while under_way:
            host, source = under_way.pop()
            host.copy_(source)

    def foreach_reduce(original: Callable[..., Any], fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        chosen = [param for param in fsdp_params if param.offload_to_cpu and param.sharded_param.grad is None]
        result = original(list(fsdp_params), *args, **kwargs)
        copies = _copies([param for param in chosen if param.sharded_param.grad is not None], blocks)
        finish()
        under_way.extend(copies)
        return result

    with (
        replaced_call(_GROUP, "foreach_reduce", foreach_reduce),
        before_the_end_of_backward(lambda _: finish() if awaited else None),
    ):
        yield


def _copies(params: Sequence[Any], blocks: _Blocks) -> list[tuple[Tensor, Tensor]]:
    """Give each parameter new host memory for its gradient; return it with the block to copy into it."""
    copies = []
    for slot, param in enumerate(params):
        gradient = param.sharded_param.grad.to_local()
        host = torch.zeros_like(gradient)
        param.sharded_param.grad = param.to_sharded_dtensor(host)
        copies.append((host, blocks.filled_with(gradient, slot=slot)))
    return copies


OFFLOAD_SOURCE_REUSED = Defect(
    id="offload-source-reused",
    title="gradients are overwritten by those of the next group while they are copied to the host",
    source=_COPY_RACE,
    mechanism="the buffer is free as soon as the host has issued the copy",
    laws=("OFF-1",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(delayed_copies_to_host, reused=True, awaited=True),
    inject_twin=partial(delayed_copies_to_host, reused=False, awaited=True),
    substrates=("gloo",),
)
OFFLOAD_SOURCE_RELEASED = Defect(
    id="offload-source-released",
    title="gradients of replicas are reused while they are copied to the host",
    source=_COPY_RACE,
    mechanism="the copy runs on the stream of the all-reduce, the memory belongs to that of the reduce-scatter",
    laws=("STREAM-5", "STREAM-6"),
    cells="id = hsdp2x2-fp32-default-meta-offloadcpu-pinned",
    inject=partial(all_reduced_buffers, dropped=True, offloaded=True),
    inject_twin=partial(all_reduced_buffers, dropped=False, offloaded=True),
    substrates=STREAMS,
)
OFFLOAD_COPY_UNFINISHED = Defect(
    id="offload-copy-unfinished",
    title="the host uses gradients whose last copies are under way",
    source=_WRONG_EVENT,
    mechanism="backward ends without waiting for the copy",
    laws=("OFF-1",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(delayed_copies_to_host, reused=False, awaited=False),
    inject_twin=partial(delayed_copies_to_host, reused=False, awaited=True),
    substrates=("gloo",),
)


def copy_events(*, dropped: bool) -> AbstractContextManager[None]:
    """Let the host forget the copies to it that are under way, or wait for them twice."""

    def act(group: Any) -> None:
        for param in group.fsdp_params:
            if dropped:
                param.grad_offload_event = None
            elif param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()

    return before_the_end_of_backward(act)


OFFLOAD_COPY_NOT_AWAITED = Defect(
    id="offload-copy-not-awaited",
    title="the host uses gradients while they are copied to it",
    source=_WRONG_EVENT,
    mechanism="nobody waits for the event that is recorded behind a copy to pinned memory",
    laws=("STREAM-5", "STREAM-6"),
    cells="id = dp2-fp32-default-meta-offloadcpu-pinned",
    inject=partial(copy_events, dropped=True),
    inject_twin=partial(copy_events, dropped=False),
    substrates=STREAMS,
)
