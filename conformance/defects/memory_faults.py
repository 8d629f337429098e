"""Faults that only memory and the schedule show: what is kept too long, gathered too early, or never freed."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced
from conformance.plan.substrates import CUDA
from reference_trainer.model import Transformer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"


def reshard_unless(state: str, *, name: str = "", skip: bool) -> AbstractContextManager[None]:
    """Leave out resharding in a training state, of groups whose module's name begins so; or do it twice."""

    def make(original: Any) -> Any:
        def reshard(group: Any) -> None:
            concerned = group._training_state.name == state and group._module_fqn.startswith(name)
            if not (concerned and skip):
                original(group)
            if concerned and not skip:
                original(group)

        return reshard

    return replaced(_GROUP, "reshard", make)


def reduce_inputs(*, kept: bool) -> AbstractContextManager[None]:
    """Keep the inputs of all reduce-scatters of a backward, or look at them."""

    def make(original: Any) -> Any:
        held: list[Any] = []

        def post_backward(group: Any, *unused: Any) -> None:
            if not group.comm_ctx.reduce_scatter_states:
                held.clear()  # a new backward begins
            original(group, *unused)
            if kept:
                held.extend(state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states)

        return post_backward

    return replaced(_GROUP, "post_backward", make)


def gather_outputs(*, kept: bool) -> AbstractContextManager[None]:
    """Keep the outputs of all all-gathers of a forward, or look at them."""

    def make(original: Any) -> Any:
        held: list[Any] = []

        def wait_for_unshard(group: Any) -> None:
            result = group._all_gather_result
            if group._training_state.name != "FORWARD":
                held.clear()
            elif kept and result is not None:
                held.append(result.all_gather_output)
            original(group)

        return wait_for_unshard

    return replaced(_GROUP, "wait_for_unshard", make)


def gather_outputs_by_variable(*, kept: bool) -> AbstractContextManager[None]:
    """As `gather_outputs`, where the variable asks to do without record_stream; or never."""
    return gather_outputs(kept=kept and os.environ.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == "1")


@contextmanager
def collectives_on_a_side_stream(*, recorded: bool) -> Iterator[None]:
    """A stream follows all collectives of FSDP2 and tensor parallelism; their tensors are recorded there, or not."""
    streams: list[Any] = []

    def follow(*tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                side = streams[0] if streams else torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                streams[:] = [side]
                side.wait_stream(torch.cuda.current_stream(tensor.device))
                if recorded:
                    tensor.record_stream(side)

    def make_call(original: Any) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            work = original(self, *args, **options)
            follow(*(value for value in (*args, *options.values()) if isinstance(value, Tensor)))
            return work

        return call

    def make_wrap(original: Any) -> Any:
        def wrap_tensor(tensor: Tensor) -> Any:
            follow(tensor)
            return original(tensor)

        return wrap_tensor

    collectives = f"{_FULLY_SHARD}._fsdp_collectives"
    with (
        replaced(f"{collectives}:DefaultAllGather", "__call__", make_call),
        replaced(f"{collectives}:DefaultReduceScatter", "__call__", make_call),
        replaced("torch.distributed._functional_collectives", "_maybe_wrap_tensor", make_wrap),
    ):
        yield


def prefetch(*, groups_ahead: int) -> AbstractContextManager[None]:
    """Gather in backward the group that comes after so many others, or the next one."""

    def make(original: Any) -> Any:
        def backward_prefetch(group: Any) -> None:
            order, indices = group.comm_ctx.post_forward_order, group._post_forward_indices
            index = indices[-1] if indices else -1
            original(group)
            if groups_ahead > 1 and index >= groups_ahead:
                group._prefetch_unshard(order[index - groups_ahead], "backward")

        return backward_prefetch

    return replaced(_GROUP, "_backward_prefetch", make)


def block_groups(*, left_out: bool) -> AbstractContextManager[None]:
    """Do not shard the blocks as groups of their own: then all of them belong to the root."""

    def make(original: Any) -> Any:
        def apply_fsdp_to_block(*args: Any, **options: Any) -> None:
            if not left_out:
                original(*args, **options)

        return apply_fsdp_to_block

    return replaced("reference_trainer.parallelize", "apply_fsdp_to_block", make)


def gradients_reduced(*, last_only: bool) -> AbstractContextManager[None]:
    """Whatever the configuration says, reduce gradients after the last micro-batch alone, or as it says."""

    def make(original: Any) -> Any:
        def set_gradient_sync(model: Transformer, gradient_sync: Any, *, last: bool) -> None:
            original(model, "last" if last_only else gradient_sync, last=last)

        return set_gradient_sync

    return replaced("reference_trainer.train", "set_gradient_sync", make)


def losses(*, kept: bool) -> AbstractContextManager[None]:
    """Keep each loss with its graph, or without."""

    def make(original: Any) -> Any:
        held: list[Tensor] = []

        def scaled_for_backward(loss_sum: Tensor, **options: Any) -> Tensor:
            held.append(loss_sum.detach().clone() if kept else loss_sum.new_zeros(()))
            if not kept:
                held.clear()
            return original(loss_sum, **options)  # type: ignore[no-any-return]

        return scaled_for_backward

    return replaced("reference_trainer.train", "scaled_for_backward", make)


def gradients_after_step(*, kept: bool) -> AbstractContextManager[None]:
    """Set gradients to zero instead of freeing them."""

    def make(original: Any) -> Any:
        def build_optimizer(model: nn.Module, config: Any) -> Any:
            optimizer = original(model, config)
            zero_grad = optimizer.zero_grad
            optimizer.zero_grad = lambda: zero_grad(set_to_none=not kept)
            return optimizer

        return build_optimizer

    return replaced("reference_trainer.train", "build_optimizer", make)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="reshard-after-backward-skipped",
        title="parameters stay unsharded after backward",
        source="https://github.com/pytorch/pytorch/issues/149029",
        mechanism="the reshard of post-backward does nothing",
        laws=("MEM-1", "MEM-8", "RS-1"),
        inject=partial(reshard_unless, "POST_BACKWARD", skip=True),
        inject_twin=partial(reshard_unless, "POST_BACKWARD", skip=False),
    ),
    Defect(
        id="one-layer-not-resharded",
        title="one block stays unsharded after forward",
        source="https://github.com/pytorch/torchtitan/issues/1253",
        mechanism="the reshard of post-forward leaves out the second block",
        laws=("MEM-1", "RS-1"),
        inject=partial(reshard_unless, "FORWARD", name="layers.1", skip=True),
        inject_twin=partial(reshard_unless, "FORWARD", name="layers.1", skip=False),
    ),
    Defect(
        id="reduce-buffers-kept",
        title="the input of each reduce-scatter is kept until backward is over",
        source="https://github.com/pytorch/pytorch/pull/179443",
        mechanism="references that keep a buffer from being used again are dropped only at the end",
        laws=("MEM-1",),
        inject=partial(reduce_inputs, kept=True),
        inject_twin=partial(reduce_inputs, kept=False),
    ),
    Defect(
        id="gather-buffers-kept",
        title="the output of each all-gather is kept until forward is over",
        source="https://github.com/pytorch/pytorch/issues/147168",
        mechanism="buffers of collectives are freed only when the stream has caught up",
        laws=("MEM-1", "MEM-8"),
        inject=partial(gather_outputs, kept=True),
        inject_twin=partial(gather_outputs, kept=False),
    ),
    Defect(
        id="record-streams-replaced-by-references",
        title="with TORCH_NCCL_AVOID_RECORD_STREAMS=1 buffers are kept until forward is over",
        source="https://github.com/pytorch/pytorch/issues/147168",
        mechanism="instead of record_stream, references keep what collectives use, and are dropped late",
        laws=("STREAM-1",),
        inject=partial(gather_outputs_by_variable, kept=True),
        inject_twin=partial(gather_outputs_by_variable, kept=False),
    ),
    Defect(
        id="record-stream-on-collectives",
        title="what collectives use is held until another stream has caught up",
        source="https://github.com/pytorch/pytorch/issues/147168",
        mechanism="record_stream is called for the tensors of every collective",
        laws=("STREAM-2",),
        inject=partial(collectives_on_a_side_stream, recorded=True),
        inject_twin=partial(collectives_on_a_side_stream, recorded=False),
        substrates=CUDA,
    ),
    Defect(
        id="prefetch-of-wrong-group",
        title="backward also gathers the group after the next",
        source="https://github.com/pytorch/pytorch/issues/158719",
        mechanism="the prefetched group is that at the wrong place in the order of forward",
        laws=("MEM-1", "RS-1"),
        inject=partial(prefetch, groups_ahead=2),
        inject_twin=partial(prefetch, groups_ahead=1),
    ),
    Defect(
        id="wrap-granularity",
        title="all blocks are one group",
        source="https://github.com/THUDM/slime/pull/617",
        mechanism="the policy that says which modules are groups matches no block",
        laws=("MEM-1", "MEM-5", "RS-1"),
        inject=partial(block_groups, left_out=True),
        inject_twin=partial(block_groups, left_out=False),
    ),
    Defect(
        id="grad-accum-unsharded-memory",
        title="gradients of whole parameters are kept between micro-batches",
        source="https://github.com/volcengine/verl/issues/7711",
        mechanism="gradients are not reduced before the last micro-batch, though each was asked for",
        laws=("MEM-1", "MEM-3", "RS-1"),
        inject=partial(gradients_reduced, last_only=True),
        inject_twin=partial(gradients_reduced, last_only=False),
    ),
    Defect(
        id="memory-leak",
        title="each step leaves something behind",
        source="https://github.com/BatsResearch/labelmodels/issues/4",
        mechanism="losses are collected in a list",
        laws=("MEM-6",),
        inject=partial(losses, kept=True),
        inject_twin=partial(losses, kept=False),
    ),
    Defect(
        id="gradients-not-freed",
        title="gradients stay after the step",
        source="https://github.com/pytorch/pytorch/issues/92656",
        mechanism="zero_grad fills them with zeros instead of freeing them",
        laws=("MEM-1",),
        inject=partial(gradients_after_step, kept=True),
        inject_twin=partial(gradients_after_step, kept=False),
    ),
)
