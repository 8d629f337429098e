"""Faults that only memory and the schedule show: buffers kept too long, gathered too early, or never freed."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Defect, repeated_call, replaced_call
from conformance.plan.substrates import STREAMS
from reference_trainer.model import Transformer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_DEEP = "id = dp4-fp32-table-meta-deep"
_DEEP_AND_PLAIN = "id in (dp4-fp32-table-meta-deep, dp2-fp32-default-meta)"
_DEEP_AND_FSDP1 = "id in (dp4-fp32-table-meta-deep, dp4-fp32-default-full-deep-fsdp1)"
_DEEP_PLAIN_AND_FSDP1 = "id in (dp4-fp32-table-meta-deep, dp2-fp32-default-meta, dp4-fp32-default-full-deep-fsdp1)"


def reshard_in(state: str, *, prefix: str = "", skip: bool) -> AbstractContextManager[None]:
    """Skip resharding in a training state, of groups whose module's name begins with `prefix`; or reshard twice."""

    def reshard(original: Callable[[Any], None], group: Any) -> None:
        concerned = group._training_state.name == state and group._module_fqn.startswith(prefix)
        if not (concerned and skip):
            original(group)
        if concerned and not skip:
            original(group)

    return replaced_call(_GROUP, "reshard", reshard)


RESHARD_AFTER_BACKWARD_SKIPPED = Defect(
    id="reshard-after-backward-skipped",
    title="parameters stay unsharded after backward",
    source="https://github.com/pytorch/pytorch/issues/149029",
    mechanism="the reshard of post-backward does nothing",
    laws=("MEM-1", "MEM-8", "RS-1"),
    cells=_DEEP_PLAIN_AND_FSDP1,
    inject=partial(reshard_in, "POST_BACKWARD", skip=True),
    inject_twin=partial(reshard_in, "POST_BACKWARD", skip=False),
)
ONE_LAYER_NOT_RESHARDED = Defect(
    id="one-layer-not-resharded",
    title="one block stays unsharded after forward",
    source="https://github.com/pytorch/torchtitan/issues/1253",
    mechanism="the reshard of post-forward leaves out the second block",
    laws=("MEM-1", "RS-1"),
    cells=_DEEP_AND_PLAIN,
    inject=partial(reshard_in, "FORWARD", prefix="layers.1", skip=True),
    inject_twin=partial(reshard_in, "FORWARD", prefix="layers.1", skip=False),
)


def reduce_inputs(*, kept: bool) -> AbstractContextManager[None]:
    """Keep the inputs of all reduce-scatters of a backward, or only look at them."""
    held: list[Any] = []

    def post_backward(original: Callable[..., None], group: Any, *unused: Any) -> None:
        if not group.comm_ctx.reduce_scatter_states:
            held.clear()  # a new backward begins
        original(group, *unused)
        if kept:
            held.extend(state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states)

    return replaced_call(_GROUP, "post_backward", post_backward)


REDUCE_BUFFERS_KEPT = Defect(
    id="reduce-buffers-kept",
    title="the input of each reduce-scatter is kept until backward is over",
    source="https://github.com/pytorch/pytorch/pull/179443",
    mechanism="references that keep a buffer from being used again are dropped only at the end",
    laws=("MEM-1",),
    cells=_DEEP,
    inject=partial(reduce_inputs, kept=True),
    inject_twin=partial(reduce_inputs, kept=False),
)


def gather_outputs(*, kept: bool) -> AbstractContextManager[None]:
    """Keep the outputs of all all-gathers of a forward, or only look at them."""
    held: list[Any] = []

    def wait_for_unshard(original: Callable[[Any], None], group: Any) -> None:
        result = group._all_gather_result
        if group._training_state.name != "FORWARD":
            held.clear()
        elif kept and result is not None:
            held.append(result.all_gather_output)
        original(group)

    return replaced_call(_GROUP, "wait_for_unshard", wait_for_unshard)


GATHER_BUFFERS_KEPT = Defect(
    id="gather-buffers-kept",
    title="the output of each all-gather is kept until forward is over",
    source="https://github.com/pytorch/pytorch/issues/147168",
    mechanism="buffers of collectives are freed only when the stream has caught up",
    laws=("MEM-1", "MEM-8", "MEM-10", "STREAM-4"),
    cells=_DEEP_AND_FSDP1,
    inject=partial(gather_outputs, kept=True),
    inject_twin=partial(gather_outputs, kept=False),
)


def gather_outputs_by_variable(*, kept: bool) -> AbstractContextManager[None]:
    """Keep the outputs of all-gathers if TORCH_NCCL_AVOID_RECORD_STREAMS=1 asks to do without record_stream."""
    return gather_outputs(kept=kept and os.environ.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == "1")


RECORD_STREAMS_REPLACED_BY_REFERENCES = Defect(
    id="record-streams-replaced-by-references",
    title="with TORCH_NCCL_AVOID_RECORD_STREAMS=1 buffers are kept until forward is over",
    source="https://github.com/pytorch/pytorch/issues/147168",
    mechanism="instead of record_stream, references keep the tensors of collectives, and are dropped too late",
    laws=("STREAM-1",),
    cells="id = dp2-fp32-default-meta-avoidrs1",
    inject=partial(gather_outputs_by_variable, kept=True),
    inject_twin=partial(gather_outputs_by_variable, kept=False),
)


@contextmanager
def collectives_on_a_side_stream(*, recorded: bool) -> Iterator[None]:
    """Let a stream follow all collectives of FSDP2 and tensor parallelism, and record their tensors there or not."""
    streams: list[Any] = []

    def follow(*tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                side = streams[0] if streams else torch.Stream(device=tensor.device)
                streams[:] = [side]
                side.wait_stream(torch.accelerator.current_stream(tensor.device))
                if recorded:
                    tensor.record_stream(side)

    def collective(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
        work = original(self, *args, **options)
        follow(*(value for value in (*args, *options.values()) if isinstance(value, Tensor)))
        return work

    def wrap_tensor(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        follow(tensor)
        return original(tensor)

    collectives = f"{_FULLY_SHARD}._fsdp_collectives"
    with (
        replaced_call(f"{collectives}:DefaultAllGather", "__call__", collective),
        replaced_call(f"{collectives}:DefaultReduceScatter", "__call__", collective),
        replaced_call("torch.distributed._functional_collectives", "_maybe_wrap_tensor", wrap_tensor),
    ):
        yield


RECORD_STREAM_ON_COLLECTIVES = Defect(
    id="record-stream-on-collectives",
    title="tensors of collectives are held until another stream has caught up",
    source="https://github.com/pytorch/pytorch/issues/147168",
    mechanism="record_stream is called for the tensors of every collective",
    laws=("STREAM-2", "STREAM-4"),
    cells="id in (dp4-fp32-default-meta-deep, dp4-fp32-default-full-deep-fsdp1)",
    inject=partial(collectives_on_a_side_stream, recorded=True),
    inject_twin=partial(collectives_on_a_side_stream, recorded=False),
    substrates=STREAMS,
)


def backward_prefetch_of(*, groups_ahead: int) -> AbstractContextManager[None]:
    """Prefetch in backward the group that comes this many groups later as well as the next; 1 is the next itself."""

    def backward_prefetch(original: Callable[[Any], None], group: Any) -> None:
        order, indices = group.comm_ctx.post_forward_order, group._post_forward_indices
        index = indices[-1] if indices else -1
        original(group)
        if groups_ahead > 1 and index >= groups_ahead:
            group._prefetch_unshard(order[index - groups_ahead], "backward")

    return replaced_call(_GROUP, "_backward_prefetch", backward_prefetch)


PREFETCH_OF_WRONG_GROUP = Defect(
    id="prefetch-of-wrong-group",
    title="backward also prefetches the group after the next",
    source="https://github.com/pytorch/pytorch/issues/158719",
    mechanism="the index of the prefetched group in the order of forward is off by one",
    laws=("MEM-1", "RS-1"),
    cells=_DEEP_AND_PLAIN,
    inject=partial(backward_prefetch_of, groups_ahead=2),
    inject_twin=partial(backward_prefetch_of, groups_ahead=1),
)


@contextmanager
def groups_of_blocks(*, are_made: bool) -> Iterator[None]:
    """Make a group of each block and tell it what to prefetch, or leave the blocks to the root's group."""
    with ExitStack() as stack:
        for name in ("apply_fsdp_to_block", "apply_prefetch"):
            stack.enter_context(repeated_call("reference_trainer.parallelize", name, times=int(are_made)))
        yield


WRAP_GRANULARITY = Defect(
    id="wrap-granularity",
    title="all blocks are one group",
    source="https://github.com/THUDM/slime/pull/617",
    mechanism="the policy that says which modules are groups matches no block, so that all blocks belong to the root",
    laws=("MEM-1", "MEM-5", "RS-1"),
    cells="id in (dp2-fp32-default-meta, dp4-fp32-table-meta-deep, dp4-fp32-always-meta-deep)",
    inject=partial(groups_of_blocks, are_made=False),
    inject_twin=partial(groups_of_blocks, are_made=True),
)


def gradients_reduced(*, last_only: bool) -> AbstractContextManager[None]:
    """Reduce gradients after the last micro-batch alone, whatever the configuration says, or as it says."""

    def set_gradient_sync(original: Callable[..., None], model: Transformer, gradient_sync: Any, *, last: bool) -> None:
        original(model, "last" if last_only else gradient_sync, last=last)

    return replaced_call("reference_trainer.train", "set_gradient_sync", set_gradient_sync)


UNSHARDED_GRADIENTS_ACCUMULATED = Defect(
    id="grad-accum-unsharded-memory",
    title="unsharded gradients are kept between micro-batches",
    source="https://github.com/volcengine/verl/issues/7711",
    mechanism="gradients are not reduced before the last micro-batch, though the configuration asks for each",
    laws=("MEM-1", "MEM-3", "RS-1"),
    cells="id = dp2-fp32-default-meta-acc2 or model = deep and accumulation > 1 and gradient_sync = each and pp = 1",
    inject=partial(gradients_reduced, last_only=True),
    inject_twin=partial(gradients_reduced, last_only=False),
)


def losses(*, kept: bool, every: int = 1) -> AbstractContextManager[None]:
    """Keep a copy of each loss, or of one of `every`, or forget it at once."""
    held: list[Tensor] = []
    calls = count()

    def scaled_for_backward(original: Callable[..., Tensor], loss_sum: Tensor, **options: Any) -> Tensor:
        copied = kept and next(calls) % every == every - 1
        held.append(loss_sum.detach().clone() if copied else loss_sum.new_zeros(()))
        if not copied:
            held.pop()
        return original(loss_sum, **options)

    return replaced_call("reference_trainer.train", "scaled_for_backward", scaled_for_backward)


MEMORY_LEAK = Defect(
    id="memory-leak",
    title="each step leaves memory allocated",
    source="https://github.com/BatsResearch/labelmodels/issues/4",
    mechanism="losses are collected in a list",
    laws=("MEM-6",),
    cells="id = dp2-fp32-default-meta-even-sgd",
    inject=partial(losses, kept=True),
    inject_twin=partial(losses, kept=False),
)
RARE_MEMORY_LEAK = Defect(
    id="rare-memory-leak",
    title="one step of seven leaves memory allocated, not the second nor the 50th",
    source="https://github.com/BatsResearch/labelmodels/issues/4",
    mechanism="some losses are collected in a list",
    laws=("MEM-6",),
    cells="id = dp2-fp32-default-meta-even-sgd",
    inject=partial(losses, kept=True, every=7),
    inject_twin=partial(losses, kept=False, every=7),
)


def counters(*, kept: bool) -> AbstractContextManager[None]:
    """Keep a copy of AdamW's counter of the last parameter after each step, or forget it at once."""
    held: list[Tensor] = []

    def build_optimizer(original: Callable[..., Any], model: nn.Module, config: Any) -> Any:
        optimizer = original(model, config)

        def copy(*_: Any) -> None:
            *_, last = optimizer.state.values()
            held.extend([last["step"].clone()] if kept and "step" in last else [])

        optimizer.register_step_post_hook(copy)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


ADAMW_LEAK = Defect(
    id="adamw-memory-leak",
    title="each step of AdamW leaves memory allocated",
    source="https://github.com/BatsResearch/labelmodels/issues/4",
    mechanism="counters of steps are collected in a list",
    laws=("MEM-6",),
    cells="id = dp2-fp32-default-meta-even",
    inject=partial(counters, kept=True),
    inject_twin=partial(counters, kept=False),
)


def gradients_after_step(*, kept: bool) -> AbstractContextManager[None]:
    """Set gradients to zero instead of freeing them, or free them."""

    def build_optimizer(original: Callable[..., Any], model: nn.Module, config: Any) -> Any:
        optimizer = original(model, config)
        zero_grad = optimizer.zero_grad
        optimizer.zero_grad = lambda: zero_grad(set_to_none=not kept)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


GRADIENTS_NOT_FREED = Defect(
    id="gradients-not-freed",
    title="gradients stay after the step",
    source="https://github.com/pytorch/pytorch/issues/92656",
    mechanism="zero_grad fills them with zeros instead of freeing them",
    laws=("MEM-1",),
    cells=_DEEP,
    inject=partial(gradients_after_step, kept=True),
    inject_twin=partial(gradients_after_step, kept=False),
)


def optimizer_state_copies(*, kept: bool, last_rank_alone: bool = False) -> AbstractContextManager[None]:
    """Copy the moments of all parameters after the first step, outside of the optimizer; keep or drop the copies."""
    copies: list[Tensor] = []

    def build_optimizer(original: Callable[..., Any], model: nn.Module, config: Any) -> Any:
        optimizer = original(model, config)

        def copy(*_: Any) -> None:
            handle.remove()
            moments = [state["exp_avg"].detach().clone() for state in optimizer.state.values()]
            concerned = not last_rank_alone or dist.get_rank() == dist.get_world_size() - 1
            copies.extend(moments if kept and concerned else [])

        handle = optimizer.register_step_post_hook(copy)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


OPTIMIZER_STATE_COPIED = Defect(
    id="optimizer-state-copied",
    title="a copy of the first moments is kept from the first step on",
    source="https://github.com/pytorch/pytorch/issues/92656",
    mechanism="the copy is in a list that nobody empties, not in the optimizer's state",
    laws=("MEM-1",),
    cells=_DEEP,
    inject=partial(optimizer_state_copies, kept=True),
    inject_twin=partial(optimizer_state_copies, kept=False),
)
OPTIMIZER_STATE_COPIED_ON_THE_LAST_RANK = Defect(
    id="optimizer-state-copied-on-the-last-rank",
    title="the last rank keeps a copy of the first moments of its shards",
    source="https://github.com/pytorch/torchtitan/issues/1777",
    mechanism="what a checkpoint collects is released on all ranks but one",
    laws=("MEM-1",),
    cells=_DEEP,
    inject=partial(optimizer_state_copies, kept=True, last_rank_alone=True),
    inject_twin=partial(optimizer_state_copies, kept=False, last_rank_alone=True),
)
