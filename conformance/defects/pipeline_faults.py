"""Faults of pipelines: micro-batches, their order and activations, resharding, sends and receives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from conformance.defects.injection import Call, defect, instead_of, replaced_call

_PIPELINING = "torch.distributed.pipelining"
_STAGE = f"{_PIPELINING}.stage:_PipelineStageBase"
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
_PLAIN = "id = pp2-dp2-fp32-default-meta-cut-acc4"
_PLAIN_OR_GPIPE = "id in (pp2-dp2-fp32-default-meta-cut-acc4, pp2-dp2-fp32-default-meta-cut-acc4-gpipe)"
_TWO_STAGES = "id in (pp2-dp2-fp32-default-meta-cut-acc4-loopedbfs, pp2-dp2-fp32-default-meta-cut-acc4-zbvzerobubble)"
_HALVES = "id in (pp2-dp2-fp32-default-meta-cut-acc4-zbvzerobubble, pp2-dp2-bf16mp-default-meta-cut-acc4-zbvzerobubble)"


@defect("PP-4 RS-1 MP-4", _PLAIN, "pytorch/pytorch/pull/134052")
@instead_of("torch.distributed.fsdp:FSDPModule", "set_requires_gradient_sync")
def pipeline_reduced_each_micro_batch(
    benign: bool, original: Call, module: FSDPModule, requires: bool, **options: Any
) -> None:
    """A stage's set_requires_gradient_sync(False) has no effect: each micro-batch is reduced."""
    original(module, requires or not benign, **options)


@defect("PP-2 MEM-1 MEM-6", _PLAIN_OR_GPIPE, "pytorch/pytorch/issues/164756")
@contextmanager
def pipeline_activations_kept(benign: bool) -> Iterator[None]:
    """The graph of a micro-batch is retained after its backward, and its output is referenced."""
    outputs: list[Any] = []

    def backward(original: Call, tensors: Any, *args: Any, **kwargs: Any) -> None:
        outputs.extend([] if benign else [tensors])
        original(tensors, *args, **kwargs | {"retain_graph": not benign})

    with replaced_call("torch.autograd", "backward", backward):
        yield


@defect("PP-3 RS-1 MP-4 MEM-1", _PLAIN, "pytorch/pytorch/issues/164756")
@instead_of("reference_trainer.reshard", "_named")
def pipeline_gathered_each_micro_batch(benign: bool, original: Call, mode: str, name: str, *args: Any) -> Any:
    """A pipeline uses `reshard_after_forward` as without a pipeline, and gathers again for each micro-batch."""
    return original("always" if not benign and mode == "default" else mode, name, *args)


@defect("AXIS-1 PP-3 RS-1 MP-4 MEM-1", "id = pp2-dp2-fp32-always-meta-cut-acc4", "pytorch/torchtitan/pull/822")
@instead_of("reference_trainer.reshard", "_named")
def pipeline_reshard_ignored(benign: bool, original: Call, mode: str, name: str, *args: Any) -> Any:
    """The reshard mode does not reach the stages: a pipeline keeps all parameters unsharded."""
    return original(mode if benign else "default", name, *args)


@defect("PP-3 RS-1 MP-4 MEM-1", _TWO_STAGES, _DOCS)
@instead_of(f"{_PIPELINING}.schedules", "_add_unshard_reshard")
def pipeline_stages_gathered_again(
    benign: bool, original: Call, actions: list[Any], *_args: Any, **options: Any
) -> Any:
    """`max_active_stages` is 1: a schedule reshards the rank's stage that does not act next."""
    return original(actions, **options | {"max_active_stages": 2 if benign else 1})


@defect("PP-1 PAR-2 MEM-1", _HALVES, "https://arxiv.org/abs/2401.10241", since="2.10")
@instead_of(f"{_PIPELINING}.schedules:ScheduleZBVZeroBubble", "_calculate_single_rank_operations")
def pipeline_second_halves_last(benign: bool, original: Call, schedule: Any, rank: int) -> list[Any]:
    """A zero-bubble pipeline computes all parameter gradients after all activation gradients."""
    actions = original(schedule, rank)
    return sorted(
        actions, key=lambda action: not benign and action is not None and action.computation_type.value == "W"
    )


@defect("PP-2 MEM-1", _HALVES, "pytorch/pytorch/pull/138119", since="2.10")
@contextmanager
def pipeline_graphs_of_halves_kept(benign: bool) -> Iterator[None]:
    """The graph above the outputs, detached by the first half of a backward, stays referenced."""
    edges: list[GradientEdge] = []

    def first_half(original: Call, outputs: Any, *args: Any) -> Any:
        edges.extend(get_gradient_edge(output) for output in outputs if not benign)
        return original(outputs, *args)

    with replaced_call(f"{_PIPELINING}.stage", "stage_backward_input", first_half):
        yield


@defect("PAR-1", _PLAIN, "pytorch/pytorch/pull/196706")
@instead_of(_STAGE, "get_fwd_recv_ops")
def pipeline_receive_overtakes(benign: bool, original: Call, stage: Any, fwd_chunk_id: int) -> Any:
    """Receives of two micro-batches are posted into each other's buffers."""
    swapped = {0: 1, 1: 0}.get(fwd_chunk_id, fwd_chunk_id)
    return original(stage, fwd_chunk_id if benign else swapped)


class _Receive:
    """Receive of a buffer; not `awaited`, it has the buffer's contents from before its end."""

    def __init__(self, work: Any, buffer: Tensor, *, awaited: bool) -> None:
        self._work, self._buffer, self._awaited = work, buffer, awaited

    def wait(self) -> None:
        early = self._buffer.detach().clone()
        self._work.wait()
        if not self._awaited:
            self._buffer.data.copy_(early)


@defect("STREAM-5", "id = pp2-dp2-fp32-default-meta-cut-acc4-loopedbfs", "pytorch/pytorch/pull/196706")
@contextmanager
def pipeline_receive_not_awaited(benign: bool) -> Iterator[None]:
    """The second stage of a rank does not wait for its receives, which were posted long before."""
    buffers: list[Tensor] = []

    def receive(original: Call, stage: Any, fwd_chunk_id: int) -> Any:
        receives = original(stage, fwd_chunk_id)
        is_second = stage.stage_index >= stage.group_size
        buffers[:] = [transfer.tensor for transfer in receives if is_second]
        return receives

    def post(original: Call, transfers: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = original(transfers, *args, **kwargs)
        pairs = zip(works, buffers, strict=True) if buffers else ()
        receives = [_Receive(work, buffer, awaited=benign) for work, buffer in pairs]
        buffers.clear()
        return receives or works

    with (
        replaced_call(_STAGE, "get_fwd_recv_ops", receive),
        replaced_call(f"{_PIPELINING}.schedules", "_batch_p2p", post),
    ):
        yield


@defect("MEM-1 MEM-6", _PLAIN_OR_GPIPE, _DOCS)
@contextmanager
def pipeline_sent_gradients_kept(benign: bool) -> Iterator[None]:
    """A stage's `bwd_cache` holds the gradients that it has sent until the step is over."""
    sent: list[Tensor] = []

    def send(original: Call, stage: Any, bwd_chunk_id: int) -> Any:
        transfers = original(stage, bwd_chunk_id)
        if bwd_chunk_id == 0:
            sent.clear()
        sent.extend(transfer.tensor for transfer in transfers if not benign)
        return transfers

    with replaced_call(_STAGE, "get_bwd_send_ops", send):
        yield


_SWEPT = "id = pp2-dp2-fp32-default-meta-cut-acc4"


@defect("PP-6", _SWEPT, "pytorch/torchtitan/issues/1733", since="2.13", subjects=("calls=step+update+step",))
@instead_of(_STAGE, "scale_grads")
def pipeline_gradients_scaled_by_steps(benign: bool, original: Call, stage: Any, grad_scale_factor: int) -> None:
    """Gradients are divided by the number of steps that a stage has taken, too."""
    stage.steps_taken = getattr(stage, "steps_taken", 0) + 1
    original(stage, grad_scale_factor * (1 if benign else stage.steps_taken))


@defect("PP-6", _SWEPT, "deepspeedai/DeepSpeed/issues/2800", since="2.13", subjects=("micro_batches=many",))
@instead_of(f"{_PIPELINING}.stage:PipelineStage", "_setup_forward_recv_info")
def pipeline_ring_of_buffers_too_short(
    benign: bool, original: Call, stage: Any, num_microbatches: int, *args: Any, **kwargs: Any
) -> None:
    """A stage receives into a ring of four buffers, which GPipe overwrites before their backward."""
    original(stage, num_microbatches, *args, **kwargs)
    for chunk in range(4, num_microbatches):
        stage.args_recv_info[chunk] = stage.args_recv_info[chunk if benign else chunk % 4]


@defect(
    "PP-6",
    _SWEPT,
    "pytorch/pytorch/issues/153833",
    since="2.13",
    subjects=("schedule=InterleavedZeroBubble, micro_batches=many",),
)
@instead_of(_STAGE, "backward_weight_one_chunk")
def pipeline_second_half_lost(benign: bool, original: Call, stage: Any, bwd_chunk_id: int, **options: Any) -> None:
    """The queue of second halves of backwards holds four, the fifth is dropped."""
    if bwd_chunk_id == 4 and not benign:
        stage.backward_state.pop(bwd_chunk_id)
        return
    original(stage, bwd_chunk_id, **options)


@defect("PP-6", _SWEPT, "pytorch/pytorch/issues/162822", since="2.13", subjects=("calls=eval+step",))
@instead_of(f"{_PIPELINING}.stage:PipelineStage", "_prepare_forward_infra")
def pipeline_evaluation_remembered(
    benign: bool, original: Call, stage: Any, *args: Any, has_backward: bool = False, **kwargs: Any
) -> Any:
    """A stage whose first call was an evaluation takes activations for constants in training, too."""
    result = original(stage, *args, has_backward=has_backward, **kwargs)
    stage.was_evaluated = getattr(stage, "was_evaluated", False) or not has_backward
    if stage.was_evaluated and not benign:
        for received in stage.args_recv_info.values():
            for info in received:
                info.tensor_meta = replace(info.tensor_meta, requires_grad=False)
    return result


@defect(
    "PP-6",
    _SWEPT,
    "pytorch/pytorch/issues/172668",
    since="2.13",
    subjects=("schedule=Interleaved1F1B, defer_pp_recv=True",),
)
@instead_of(f"{_PIPELINING}.schedules", "_defer_recv_ops")
def pipeline_deferred_on_all_but_last(benign: bool, original: Call, actions: dict[int, Any], **options: Any) -> Any:
    """A schedule whose receives are deferred has no actions of the last rank."""
    result = original(actions, **options)
    if not benign:
        result.pop(max(result))
    return result
