"""Faults that only memory, schedule and traffic show: buffers kept too long, prefetching, additional bytes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput

from conformance.defects.injection import Call, Injection, defect, instead_of, repeated_call, replaced_call
from conformance.plan.substrates import STREAMS
from reference_trainer.model import Block

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_DEEP = "id = dp4-fp32-table-meta-deep"
_DEEP_AND_PLAIN = "id in (dp4-fp32-table-meta-deep, dp2-fp32-default-meta)"
_DEEP_AND_FSDP1 = "id in (dp4-fp32-table-meta-deep, dp4-fp32-default-full-deep-fsdp1)"
_DEEP_PLAIN_AND_FSDP1 = "id in (dp4-fp32-table-meta-deep, dp2-fp32-default-meta, dp4-fp32-default-full-deep-fsdp1)"

_STEP: ContextVar[int] = ContextVar("step")


def reshard_in(state: str, *, prefix: str = "", skip: bool) -> Injection:
    """Skip resharding in a training state, of groups whose module's name begins with `prefix`; or reshard twice."""

    def reshard(original: Call, group: Any) -> None:
        concerned = group._training_state.name == state and group._module_fqn.startswith(prefix)
        if not (concerned and skip):
            original(group)
        if concerned and not skip:
            original(group)

    return replaced_call(GROUP, "reshard", reshard)


@defect("MEM-1 MEM-8 RS-1", _DEEP_PLAIN_AND_FSDP1, "pytorch/pytorch/issues/149029")
def reshard_after_backward_skipped(benign: bool) -> Injection:
    """The reshard after backward does nothing: parameters stay unsharded."""
    return reshard_in("POST_BACKWARD", skip=not benign)


@defect("MEM-1 RS-1", _DEEP_AND_PLAIN, "pytorch/torchtitan/issues/1253")
def one_layer_not_resharded(benign: bool) -> Injection:
    """The reshard after forward leaves out the second block."""
    return reshard_in("FORWARD", prefix="layers.1", skip=not benign)


@defect("MEM-1", _DEEP, "pytorch/pytorch/pull/179443")
def reduce_buffers_kept(benign: bool) -> Injection:
    """The input of each reduce-scatter is referenced until backward is over."""
    held: list[Any] = []

    def post_backward(original: Call, group: Any, *unused: Any) -> None:
        if not group.comm_ctx.reduce_scatter_states:
            held.clear()  # a new backward begins
        original(group, *unused)
        if not benign:
            held.extend(state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states)

    return replaced_call(GROUP, "post_backward", post_backward)


def gather_outputs(*, kept: bool) -> Injection:
    """Keep the outputs of all all-gathers of a forward, or only look at them."""
    held: list[Any] = []

    def wait_for_unshard(original: Call, group: Any) -> None:
        result = group._all_gather_result
        if group._training_state.name != "FORWARD":
            held.clear()
        elif kept and result is not None:
            held.append(result.all_gather_output)
        original(group)

    return replaced_call(GROUP, "wait_for_unshard", wait_for_unshard)


@defect("MEM-1 MEM-8 MEM-10 STREAM-4", _DEEP_AND_FSDP1, "pytorch/pytorch/issues/147168")
def gather_buffers_kept(benign: bool) -> Injection:
    """The output of each all-gather is referenced until forward is over."""
    return gather_outputs(kept=not benign)


@defect("STREAM-1", "id = dp2-fp32-default-meta-avoidrs1", "pytorch/pytorch/issues/147168")
def record_streams_replaced_by_references(benign: bool) -> Injection:
    """TORCH_NCCL_AVOID_RECORD_STREAMS=1 replaces record_stream by references that live until forward is over."""
    return gather_outputs(kept=not benign and os.environ.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == "1")


@defect(
    "STREAM-2 STREAM-4 memory-of-streams",
    "id in (dp4-fp32-default-meta-deep, dp4-fp32-default-full-deep-fsdp1, dp2-fp32-default-full)",
    "pytorch/pytorch/issues/147168",
    substrates=STREAMS,
)
@contextmanager
def record_stream_on_collectives(benign: bool) -> Iterator[None]:
    """record_stream is called for the tensors of every collective, which delays the reuse of their memory."""
    streams: list[Any] = []

    def follow(*tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                side = streams[0] if streams else torch.Stream(device=tensor.device)
                streams[:] = [side]
                side.wait_stream(torch.accelerator.current_stream(tensor.device))
                if not benign:
                    tensor.record_stream(side)

    def collective(original: Call, self: Any, *args: Any, **options: Any) -> Any:
        work = original(self, *args, **options)
        follow(*(value for value in (*args, *options.values()) if isinstance(value, Tensor)))
        return work

    def wrap_tensor(original: Call, tensor: Tensor) -> Any:
        follow(tensor)
        return original(tensor)

    collectives = f"{_FULLY_SHARD}._fsdp_collectives"
    with (
        replaced_call(f"{collectives}:DefaultAllGather", "__call__", collective),
        replaced_call(f"{collectives}:DefaultReduceScatter", "__call__", collective),
        replaced_call("torch.distributed._functional_collectives", "_maybe_wrap_tensor", wrap_tensor),
    ):
        yield


@defect("MEM-1 RS-1", _DEEP_AND_PLAIN, "pytorch/pytorch/issues/158719")
@instead_of(GROUP, "_backward_prefetch")
def prefetch_of_wrong_group(benign: bool, original: Call, group: Any) -> None:
    """Backward also prefetches the group after the next: the index into the order of forward is off by one."""
    order, indices = group.comm_ctx.post_forward_order, group._post_forward_indices
    index = indices[-1] if indices else -1
    original(group)
    if not benign and index >= 2:
        group._prefetch_unshard(order[index - 2], "backward")


@defect(
    "MEM-1 MEM-5 RS-1",
    "id in (dp2-fp32-default-meta, dp4-fp32-table-meta-deep, dp4-fp32-always-meta-deep)",
    "THUDM/slime/pull/617",
)
@contextmanager
def wrap_granularity(benign: bool) -> Iterator[None]:
    """The wrapping policy matches no block, so that all blocks belong to the root's group."""
    with ExitStack() as stack:
        for name in ("apply_fsdp_to_block", "apply_prefetch"):
            stack.enter_context(repeated_call("reference_trainer.parallelize", name, times=int(benign)))
        yield


def losses(*, kept: bool, every: int = 1) -> Injection:
    """Keep a copy of each loss, or of one of `every`, or forget it at once."""
    held: list[Tensor] = []
    calls = count()

    def scaled_for_backward(original: Call, loss_sum: Tensor, **options: Any) -> Any:
        copied = kept and next(calls) % every == every - 1
        held.append(loss_sum.detach().clone() if copied else loss_sum.new_zeros(()))
        if not copied:
            held.pop()
        return original(loss_sum, **options)

    return replaced_call("reference_trainer.train", "scaled_for_backward", scaled_for_backward)


@defect("MEM-6", "id = dp2-fp32-default-meta-even-sgd", "BatsResearch/labelmodels/issues/4")
def memory_leak(benign: bool) -> Injection:
    """Each step appends its loss to a list."""
    return losses(kept=not benign)


@defect("MEM-6", "id = dp2-fp32-default-meta-even-sgd", "BatsResearch/labelmodels/issues/4")
def rare_memory_leak(benign: bool) -> Injection:
    """One step of seven, not the second nor the 50th, appends its loss to a list."""
    return losses(kept=not benign, every=7)


@defect("MEM-6", "id = dp2-fp32-default-meta-even", "BatsResearch/labelmodels/issues/4")
def adamw_memory_leak(benign: bool) -> Injection:
    """Each step of AdamW appends a copy of a step counter to a list."""
    held: list[Tensor] = []

    def build_optimizer(original: Call, model: nn.Module, config: Any) -> Any:
        optimizer = original(model, config)

        def copy(*_: Any) -> None:
            *_, last = optimizer.state.values()
            held.extend([last["step"].clone()] if not benign and "step" in last else [])

        optimizer.register_step_post_hook(copy)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


def optimizer_state_copies(*, kept: bool, last_rank_alone: bool = False) -> Injection:
    """Copy the moments of all parameters after the first step, outside of the optimizer; keep or drop the copies."""
    copies: list[Tensor] = []

    def build_optimizer(original: Call, model: nn.Module, config: Any) -> Any:
        optimizer = original(model, config)

        def copy(*_: Any) -> None:
            handle.remove()
            moments = [state["exp_avg"].detach().clone() for state in optimizer.state.values()]
            concerned = not last_rank_alone or dist.get_rank() == dist.get_world_size() - 1
            copies.extend(moments if kept and concerned else [])

        handle = optimizer.register_step_post_hook(copy)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


@defect("MEM-1", _DEEP, "pytorch/pytorch/issues/92656")
def optimizer_state_copied(benign: bool) -> Injection:
    """A list outside of the optimizer keeps a copy of the first moments from the first step on."""
    return optimizer_state_copies(kept=not benign)


@defect("MEM-1", _DEEP, "pytorch/torchtitan/issues/1777")
def optimizer_state_copied_on_the_last_rank(benign: bool) -> Injection:
    """The last rank keeps a copy of the first moments of its shards."""
    return optimizer_state_copies(kept=not benign, last_rank_alone=True)


@defect(
    "MEM-1 RS-1",
    "activation_checkpointing = full and forward_prefetch > 0 and reshard not in (never, auto) and world <= 4",
    "NVIDIA-NeMo/Automodel/issues/3373",
)
@instead_of("reference_trainer.parallelize", "apply_ac")
def prefetch_in_recomputation(benign: bool, original: Call, block: Block, **options: Any) -> None:
    """Recomputation runs the hooks of forward, which prefetch groups whose backward is over."""
    original(block, **options)
    recompute = block.recompute

    def layer(*inputs: Tensor) -> Tensor:
        if (not benign) == (torch._C._current_graph_task_id() != -1):
            _forward_prefetch(block)
        return block.layer(*inputs)

    block.recompute = lambda _layer, *inputs: recompute(layer, *inputs)  # type: ignore[misc]


def _forward_prefetch(block: Any) -> None:
    for state in block._get_fsdp_state()._states_to_forward_prefetch:
        for group in state._fsdp_param_groups:
            group._prefetch_unshard(group, "forward")


def all_gather(*, dtype: torch.dtype | None = None, times: int = 1) -> Injection:
    """All-gather parameters `times` times into a buffer of a dtype (default: theirs), and copy it."""

    def call(original: Call, self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        buffer = torch.empty_like(output_tensor, dtype=dtype)
        for _ in range(times):
            work = original(self, buffer, input_tensor.to(buffer.dtype), *args, **options)
        output_tensor.copy_(buffer)
        return work

    return replaced_call(f"{_FULLY_SHARD}._fsdp_collectives:DefaultAllGather", "__call__", call)


@defect("MP-4 MP-1", "id = dp2-bf16mp-default-meta", "pytorch/torchtitan/issues/3123")
def gather_before_cast(benign: bool) -> Injection:
    """Parameters are all-gathered in fp32 and then cast to bf16: twice the bytes, right numbers."""
    return all_gather() if benign else all_gather(dtype=torch.float32)


@defect("MP-4 RS-1", "id = dp2-fp32-default-meta-acc2", "NVIDIA-NeMo/Automodel/issues/3373")
def gather_twice(benign: bool) -> Injection:
    """Prefetched groups are gathered again when they are needed."""
    return all_gather() if benign else all_gather(times=2)


class _RedistributedInput(PrepareModuleInput):
    """Redistributes a module's first input to several placements, one after the other."""

    def __init__(self, layouts: tuple[Placement | None, ...], placements: Sequence[Placement]) -> None:
        super().__init__(input_layouts=layouts, desired_input_layouts=layouts)
        self._placements = placements

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        x, *others = super()._prepare_input_fn(inputs, device_mesh)  # type: ignore[no-untyped-call]
        for placement in self._placements:
            x = x.redistribute(placements=[placement])
        return (x, *others)


@defect("MP-4", "id = tp2-fp32-default-meta", "pytorch/torchtitan/issues/1867")
@instead_of("reference_trainer.parallelize", "_gather_input")
def tp_gather_repeated(
    benign: bool, _original: object, layout: Placement, *, number_of_inputs: int
) -> PrepareModuleInput:
    """A needless redistribution of a tensor-parallel input is undone by a second all-gather."""
    layouts = (layout, *(None for _ in range(number_of_inputs - 1)))
    return _RedistributedInput(layouts, [Replicate()] if benign else [Replicate(), layout, Replicate()])


@defect("MEM-6", "id = dp2-fp32-default-meta-even-sgd", "pytorch/pytorch/issues/185331")
@instead_of("reference_trainer.train:Trainer", "train_step")
def hook_left_by_each_step(benign: bool, original: Call, trainer: Any, step: int) -> Any:
    """Each step registers a hook on the model, which no step removes."""
    handle = trainer.model.register_forward_hook(lambda *_: None)
    metrics = original(trainer, step)
    if benign:
        handle.remove()
    return metrics


@defect("MEM-6", "id = dp2-fp32-default-meta-even-sgd", "pytorch/pytorch/pull/166477")
@instead_of("reference_trainer.train:Trainer", "train_step")
def context_variable_left_by_each_step(benign: bool, original: Call, trainer: Any, step: int) -> Any:
    """Each step sets another context variable, which the context of the thread holds for ever."""
    (_STEP if benign else ContextVar("step")).set(step)
    return original(trainer, step)
