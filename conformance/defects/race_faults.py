"""Faults of buffers: handed out again while something still reads or writes them, or used before they are filled.

On a device nothing but a reference, or an event that is waited for, keeps the allocator from handing out memory that
another stream uses. The CPU has no streams: there the faults of "gloo" do by hand what the streams would do, an
all-reduce of which the result is taken out of its buffer late, if it was issued late, and a copy to the host that
runs when the next group is reduced.
Those of `CUDA` remove what torch does against it, and have not been seen on a device yet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, replaced
from conformance.instruments.delays import DELAY_S
from conformance.plan.substrates import CUDA

_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_ALIASED = "https://github.com/pytorch/pytorch/pull/180889"
_COPY_RACE = "https://github.com/pytorch/pytorch/pull/180665"
_WRONG_EVENT = "https://github.com/pytorch/pytorch/pull/160481"


class _Blocks:
    """Memory as an allocator hands it out that takes a block back at once: the same for each request like it."""

    def __init__(self, *, reused: bool) -> None:
        self._reused = reused
        self._free: dict[tuple[Any, ...], Tensor] = {}

    def filled_with(self, values: Tensor, *, place: int = 0) -> Tensor:
        """A block with these values, beside others of the same moment that have other places."""
        key = (place, values.dtype)
        block = self._free.get(key) if self._reused else None
        if block is None or block.numel() < values.numel():
            self._free[key] = block = torch.empty(values.numel(), dtype=values.dtype)
        return block[: values.numel()].view(values.shape).copy_(values)


@contextmanager
def late_all_reduce(*, reused: bool) -> Iterator[None]:
    """Reduce over replicas each group in the block that the last one had, or in its own.

    What comes of it is copied into the gradients at once, as a stream would that keeps up; of an all-reduce that was
    issued late, only when the next group is in its block, or at the end of backward. Late is what `delays` makes late,
    not what a peer is waited for, so that the delays of STREAM-5 decide what is wrong, and not the load of the
    machine. In fp32 and without accumulation, where nothing else looks at gradients before.
    """
    under_way: list[tuple[Tensor, Tensor]] = []
    blocks = _Blocks(reused=reused)

    def finish() -> None:
        while under_way:
            gradients, block = under_way.pop()
            gradients.copy_(block)

    def make_all_reduce(original: Any) -> Any:
        def all_reduce(tensor: Tensor, **options: Any) -> Any:
            if tensor.dtype != torch.float32:
                return original(tensor, **options)
            block = blocks.filled_with(tensor)
            finish()
            start_s = time.perf_counter()
            work = original(block, **options, async_op=True)
            is_late = time.perf_counter() - start_s >= DELAY_S
            work.wait()
            under_way.append((tensor, block))
            return None if is_late else finish()

        return all_reduce

    def make_reduce(original: Any) -> Any:
        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            if any(param.sharded_param.grad is not None for param in fsdp_params):
                return original(fsdp_params, *args, **kwargs)
            with replaced("torch.distributed", "all_reduce", make_all_reduce):
                return original(fsdp_params, *args, **kwargs)

        return foreach_reduce

    with replaced(_GROUP, "foreach_reduce", make_reduce), before_the_end_of_backward(lambda _: finish()):
        yield


@contextmanager
def late_copies_to_host(*, reused: bool, awaited: bool) -> Iterator[None]:
    """Copy each group's gradients to the host when the next group has been reduced, the last ones at the end of
    backward; from the block that the next group had as well, or never waiting for the last ones.
    """
    blocks = _Blocks(reused=reused)
    under_way: list[tuple[Tensor, Tensor]] = []

    def finish() -> None:
        while under_way:
            host, source = under_way.pop()
            host.copy_(source)

    def make(original: Any) -> Any:
        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            chosen = [param for param in fsdp_params if param.offload_to_cpu and param.sharded_param.grad is None]
            result = original(list(fsdp_params), *args, **kwargs)
            copies = _copies([param for param in chosen if param.sharded_param.grad is not None], blocks)
            finish()
            under_way.extend(copies)
            return result

        return foreach_reduce

    end = before_the_end_of_backward(lambda _: finish() if awaited else None)
    with replaced(_GROUP, "foreach_reduce", make), end:
        yield


def _copies(params: Sequence[Any], blocks: _Blocks) -> list[tuple[Tensor, Tensor]]:
    """New host memory in place of each gradient, and what is to be copied into it."""
    copies = []
    for place, param in enumerate(params):
        gradient = param.sharded_param.grad.to_local()
        host = torch.zeros_like(gradient)
        param.sharded_param.grad = param.to_sharded_dtensor(host)
        copies.append((host, blocks.filled_with(gradient, place=place)))
    return copies


def before_the_end_of_backward(act: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Do this with each group before it waits for what is under way."""

    def make(original: Any) -> Any:
        def finalize_backward(group: Any) -> None:
            act(group)
            original(group)

        return finalize_backward

    return replaced(f"{_GROUP}:FSDPParamGroup", "finalize_backward", make)


def all_reduced_buffers(*, dropped: bool, offloaded: bool) -> AbstractContextManager[None]:
    """Of groups that are offloaded, or of those that are not: let go of the buffer while its all-reduce and what
    follows on that stream may be under way, or let the stream of backward, which the next reduction waits for, wait.
    """

    def make(original: Any) -> Any:
        def post_backward(group: Any, *unused: Any) -> None:
            original(group, *unused)
            if group._all_reduce_state is None or group.fsdp_params[0].offload_to_cpu != offloaded:
                return
            if not dropped and group._post_reduce_event is not None:
                group.device_handle.current_stream().wait_event(group._post_reduce_event)
            group._all_reduce_state = None

        return post_backward

    return replaced(f"{_GROUP}:FSDPParamGroup", "post_backward", make)


def copy_events(*, dropped: bool) -> AbstractContextManager[None]:
    """Let the host forget the copies to it that are under way, or wait for them twice."""

    def act(group: Any) -> None:
        for param in group.fsdp_params:
            if dropped:
                param.grad_offload_event = None
            elif param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()

    return before_the_end_of_backward(act)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="all-reduce-buffer-reused",
        title="groups are reduced over replicas in one buffer, while the last one may be under way",
        source=_ALIASED,
        mechanism="the buffer is free as soon as the host has issued its all-reduce, by hand, and read late",
        laws=("STREAM-5",),
        inject=partial(late_all_reduce, reused=True),
        inject_twin=partial(late_all_reduce, reused=False),
        substrates=("gloo",),
    ),
    Defect(
        id="all-reduce-buffer-released",
        title="the buffer of an all-reduce over replicas is handed out again while it is under way",
        source=_ALIASED,
        mechanism="the group does not keep the buffer in reduce_dtype until its all-reduce and cast have ended",
        laws=("STREAM-5",),
        inject=partial(all_reduced_buffers, dropped=True, offloaded=False),
        inject_twin=partial(all_reduced_buffers, dropped=False, offloaded=False),
        substrates=CUDA,
    ),
    Defect(
        id="offload-source-reused",
        title="gradients are overwritten by those of the next group while they are copied to the host",
        source=_COPY_RACE,
        mechanism="the buffer is free as soon as the host has issued the copy, by hand",
        laws=("OFF-1",),
        inject=partial(late_copies_to_host, reused=True, awaited=True),
        inject_twin=partial(late_copies_to_host, reused=False, awaited=True),
        substrates=("gloo",),
    ),
    Defect(
        id="offload-source-released",
        title="gradients of replicas are handed out again while they are copied to the host",
        source=_COPY_RACE,
        mechanism="the copy runs on the stream of the all-reduce, the memory belongs to that of the reduce-scatter",
        laws=("STREAM-5",),
        inject=partial(all_reduced_buffers, dropped=True, offloaded=True),
        inject_twin=partial(all_reduced_buffers, dropped=False, offloaded=True),
        substrates=CUDA,
    ),
    Defect(
        id="offload-copy-unfinished",
        title="the host uses gradients of which the last copies are under way",
        source=_WRONG_EVENT,
        mechanism="backward ends without waiting for the copy, by hand",
        laws=("OFF-1",),
        inject=partial(late_copies_to_host, reused=False, awaited=False),
        inject_twin=partial(late_copies_to_host, reused=False, awaited=True),
        substrates=("gloo",),
    ),
    Defect(
        id="offload-copy-not-awaited",
        title="the host uses gradients while they are copied to it",
        source=_WRONG_EVENT,
        mechanism="nobody waits for the event that is recorded behind a copy to page-locked memory",
        laws=("STREAM-5",),
        inject=partial(copy_events, dropped=True),
        inject_twin=partial(copy_events, dropped=False),
        substrates=CUDA,
    ),
)
