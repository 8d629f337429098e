"""Faults of buffers, reused or read while an operator still uses them, and of CPU offloading.

On a device nothing but a reference, or an event that is waited for, keeps the allocator from reusing memory that
another stream uses. The CPU has no streams: there the defects of the substrate "gloo" reorder copies as streams would.
The result of an all-reduce that was issued with a delay leaves its buffer later, and a copy to the host runs when the
next group is reduced.
The defects of `STREAMS` remove torch's protection against reuse, and have not been seen on a device yet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.clipping_faults import local_norm, scale
from conformance.defects.injection import Call, Injection, defect, instead_of, repeated_call, replaced_call
from conformance.instruments.delays import DELAY_S
from conformance.instruments.sharding import local
from conformance.plan.substrates import STREAMS
from reference_trainer.train import Trainer

_WAIT_S = 0.003
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_ALIASED = "pytorch/pytorch/pull/180889"
_COPY_RACE = "pytorch/pytorch/pull/180665"
_WRONG_EVENT = "pytorch/pytorch/pull/160481"


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


def before_the_end_of_backward(act: Callable[[Any], None]) -> Injection:
    """Call `act(group)` for each group before it waits for the operators that backward has issued."""

    def finalize_backward(original: Call, group: Any) -> None:
        act(group)
        original(group)

    return replaced_call(f"{_GROUP}:FSDPParamGroup", "finalize_backward", finalize_backward)


@defect("STREAM-5", "id = hsdp2x2-fp32-default-meta", _ALIASED, substrates=("gloo",))
@contextmanager
def all_reduce_buffer_reused(benign: bool) -> Iterator[None]:
    """The buffer of an all-reduce over replicas is free once issued, and overwritten while it is in flight.

    The result is copied into the gradients at once, as by a stream that keeps up. If the all-reduce was issued with a
    delay, it is copied only when the next group is in its block, or at the end of backward. Delays are those of
    `instruments.delays`, not waits for a peer, so that STREAM-5 and not the load of the machine decides the result.
    This covers fp32 without accumulation, where nothing else reads gradients before.
    """
    under_way: list[tuple[Tensor, Tensor]] = []
    blocks = _Blocks(reused=not benign)

    def finish() -> None:
        while under_way:
            gradients, block = under_way.pop()
            gradients.copy_(block)

    def all_reduce(original: Call, tensor: Tensor, **options: Any) -> Any:
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

    def foreach_reduce(original: Call, fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        if any(param.sharded_param.grad is not None for param in fsdp_params):
            return original(fsdp_params, *args, **kwargs)
        with replaced_call("torch.distributed", "all_reduce", all_reduce):
            return original(fsdp_params, *args, **kwargs)

    with replaced_call(_GROUP, "foreach_reduce", foreach_reduce), before_the_end_of_backward(lambda _: finish()):
        yield


def all_reduced_buffers(*, dropped: bool, offloaded: bool) -> Injection:
    """Drop a group's reference to the buffer of its all-reduce, in flight or (not `dropped`) after waiting for it.

    Only offloaded groups are concerned, or only the others. The waiting stream is that of backward, for which the next
    reduction waits.
    """

    def post_backward(original: Call, group: Any, *unused: Any) -> None:
        original(group, *unused)
        if group._all_reduce_state is None or group.fsdp_params[0].offload_to_cpu != offloaded:
            return
        if not dropped and group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)
        group._all_reduce_state = None

    return replaced_call(f"{_GROUP}:FSDPParamGroup", "post_backward", post_backward)


@defect("STREAM-5 STREAM-6", "id = hsdp2x2-bf16reduce-default-meta", _ALIASED, substrates=STREAMS)
def all_reduce_buffer_released(benign: bool) -> Injection:
    """A group drops the buffer in reduce_dtype before its all-reduce over replicas and cast have ended."""
    return all_reduced_buffers(dropped=not benign, offloaded=False)


@contextmanager
def delayed_copies_to_host(*, reused: bool, awaited: bool) -> Iterator[None]:
    """Copy each group's gradients to the host when the next group has been reduced, the last ones at the end.

    If blocks are `reused`, the next group overwrites the source. Without `awaited`, the last copies are never made.
    """
    blocks = _Blocks(reused=reused)
    under_way: list[tuple[Tensor, Tensor]] = []

    def finish() -> None:
        while under_way:
            host, source = under_way.pop()
            host.copy_(source)

    def foreach_reduce(original: Call, fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
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


@defect("OFF-1", "id = dp2-fp32-default-meta-offloadcpu", _COPY_RACE, substrates=("gloo",))
def offload_source_reused(benign: bool) -> Injection:
    """The buffer of a copy to the host is free once issued: the next group's gradients overwrite it."""
    return delayed_copies_to_host(reused=not benign, awaited=True)


@defect("STREAM-5 STREAM-6", "id = hsdp2x2-fp32-default-meta-offloadcpu-pinned", _COPY_RACE, substrates=STREAMS)
def offload_source_released(benign: bool) -> Injection:
    """The copy to the host runs on the all-reduce stream, and its source belongs to the reduce-scatter stream."""
    return all_reduced_buffers(dropped=not benign, offloaded=True)


@defect("OFF-1", "id = dp2-fp32-default-meta-offloadcpu", _WRONG_EVENT, substrates=("gloo",))
def offload_copy_unfinished(benign: bool) -> Injection:
    """Backward ends without waiting for the last copies to the host."""
    return delayed_copies_to_host(reused=False, awaited=benign)


@defect(
    "STREAM-5 STREAM-6 unordered-accesses schedules-agree",
    "id in (dp2-fp32-default-meta-offloadcpu-pinned, dp2-bf16mp-default-full-acc2-offloadcpu)",
    _WRONG_EVENT,
    substrates=STREAMS,
)
def offload_copy_not_awaited(benign: bool) -> Injection:
    """Nothing waits for the event that is recorded behind a copy to pinned memory."""

    def act(group: Any) -> None:
        for param in group.fsdp_params:
            if not benign:
                param.grad_offload_event = None
            elif param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()

    return before_the_end_of_backward(act)


@defect("STREAM-5", "id = tp2-fp32-default-meta", "pytorch/pytorch/issues/180665")
@instead_of("torch.distributed._functional_collectives", "wait_tensor")
def result_before_its_time(benign: bool, original: Call, tensor: Tensor) -> Any:
    """The code waits for a fixed time instead of an asynchronous collective's end."""
    time.sleep(_WAIT_S)
    early = tensor.detach().clone()
    result = original(tensor)
    with torch.no_grad():
        result.copy_(result.detach().clone() if benign else early)
    return result


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
Clip = Callable[[Trainer], Tensor]
"""Signature of the trainer's method that clips and returns the norm."""


def clipping_if_offloaded(clip: Callable[[Trainer, Clip], Tensor]) -> Injection:
    """Clip by `clip(trainer, original)` where parameters are offloaded, and by the original where they are not."""

    def clip_if_offloaded(original: Clip, trainer: Trainer) -> Tensor:
        return clip(trainer, original) if trainer.config.offload == "cpu" else original(trainer)

    return replaced_call("reference_trainer.train:Trainer", "_clip", clip_if_offloaded)


def by_local_norm(trainer: Trainer, _original: Clip) -> Tensor:
    """Clip by the norm of this rank's shards, and return it."""
    options = trainer.config.optimizer
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = local_norm(gradients, options.norm_order)
    scale(gradients, (options.max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def clipped_copies(trainer: Trainer, original: Clip) -> Tensor:
    """Clip copies of the gradients, which take their place."""
    for parameter in trainer.model.parameters():
        parameter.grad = parameter.grad.clone() if parameter.grad is not None else None
    return original(trainer)


@defect("OFF-1 CLIP-1", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
def offload_norm_local(benign: bool) -> Injection:
    """Offloaded gradients are clipped by each rank's own norm, which NCCL cannot reduce in host memory."""
    return clipping_if_offloaded(clipped_copies if benign else by_local_norm)


def norm_alone(trainer: Trainer, original: Clip) -> Tensor:
    """Return the norm without clipping."""
    kept = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    norm = original(trainer)
    for parameter, grad in zip(trainer.model.parameters(), kept, strict=True):
        parameter.grad = grad
    return norm


@defect("OFF-1 CLIP-2", "id = dp2-fp32-default-meta-offloadcpu", "meta-pytorch/torchtune/issues/1977")
def offload_clip_forgotten(benign: bool) -> Injection:
    """Clipping is switched off with offloading, where it would fail."""
    return clipping_if_offloaded(clipped_copies if benign else norm_alone)


@defect("OFF-1", "id = dp2-fp32-default-meta-acc2-offloadcpu", "instructlab/training/issues/414")
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce")
def offload_accumulation_overwritten(
    benign: bool, original: Call, fsdp_params: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """The copy to the host replaces the accumulated gradient instead of being added to it."""
    for managed in fsdp_params:
        grad = managed.sharded_param.grad
        if managed.offload_to_cpu and grad is not None:
            managed.sharded_param.grad = grad.clone() if benign else None
    return original(fsdp_params, *args, **kwargs)


@defect("OPT-1 PAR-1", "id = dp1-fp32-default-meta", "huggingface/accelerate/issues/3394")
@instead_of("reference_trainer.train", "build_optimizer")
def offload_step_on_copies(benign: bool, original: Call, model: nn.Module, config: Any) -> Any:
    """The optimizer steps with host copies of the parameters, and FSDP gathers its own."""
    optimizer = original(model, config)
    for group in optimizer.param_groups:
        group["params"] = [p if benign else nn.Parameter(p.detach().clone()) for p in group["params"]]
    return optimizer


@defect("OFF-3", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
@instead_of("torch.nn.utils.clip_grad", "_get_total_norm")
def clip_without_backend_local(benign: bool, original: Call, tensors: list[Tensor], *options: Any) -> Any:
    """The error of the missing backend is caught: each rank takes its own norm."""
    try:
        return original(tensors, *options)
    except RuntimeError:
        if benign:
            raise
        return original([local(tensor) for tensor in tensors], *options)


@defect("OFF-3", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
@contextmanager
def wrong_memory_accepted(benign: bool) -> Iterator[None]:
    """FSDP does not check the device of its parameters before it first uses them."""
    times = 2 if benign else 0
    owner = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
    with (
        repeated_call(owner, "_validate_no_meta_params", times=times),
        repeated_call(owner, "_validate_cpu_offload_params", times=times),
    ):
        yield
