"""Faults of what the stages of a pipeline send and receive."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from conformance.defects.injection import Defect, replaced_call

_PIPELINING = "torch.distributed.pipelining"
_STAGE = f"{_PIPELINING}.stage:_PipelineStageBase"
_PLAIN = "id = pp2-dp2-fp32-default-meta-cut-acc4"
_PLAIN_OR_GPIPE = "id in (pp2-dp2-fp32-default-meta-cut-acc4, pp2-dp2-fp32-default-meta-cut-acc4-gpipe)"
_LOOPED = "id = pp2-dp2-fp32-default-meta-cut-acc4-loopedbfs"


def received(*, overtakes: bool) -> AbstractContextManager[None]:
    """Let the first two activations that a stage receives go into each other's buffers, or into their own."""

    def receive(original: Callable[..., Any], stage: Any, fwd_chunk_id: int) -> Any:
        swapped = {0: 1, 1: 0}.get(fwd_chunk_id, fwd_chunk_id)
        return original(stage, swapped if overtakes else fwd_chunk_id)

    return replaced_call(_STAGE, "get_fwd_recv_ops", receive)


RECEIVE_OVERTAKES = Defect(
    id="pipeline-receive-overtakes",
    title="a stage receives the activations of a micro-batch in the place of another one's",
    source="https://github.com/pytorch/pytorch/pull/196706",
    mechanism="receives of two micro-batches are posted into each other's buffers",
    laws=("PAR-1",),
    cells=_PLAIN,
    inject=partial(received, overtakes=True),
    inject_twin=partial(received, overtakes=False),
)


class _Receive:
    """Receive whose buffer holds, once it is waited for, all that is sent, or what has come before."""

    def __init__(self, work: Any, buffer: Tensor, *, awaited: bool) -> None:
        self._work, self._buffer, self._awaited = work, buffer, awaited

    def wait(self) -> None:
        early = self._buffer.detach().clone()
        self._work.wait()
        if not self._awaited:
            self._buffer.data.copy_(early)


@contextmanager
def receives_of_later_stages(*, awaited: bool) -> Iterator[None]:
    """Wait for activations that the second stage of a rank receives, or take what is in their buffers.

    Such a receive is posted long before it is needed.
    """
    buffers: list[Tensor] = []

    def receive(original: Callable[..., list[Any]], stage: Any, fwd_chunk_id: int) -> list[Any]:
        receives = original(stage, fwd_chunk_id)
        is_second = stage.stage_index >= stage.group_size
        buffers[:] = [transfer.tensor for transfer in receives if is_second]
        return receives

    def post(original: Callable[..., list[Any]], transfers: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = original(transfers, *args, **kwargs)
        pairs = zip(works, buffers, strict=True) if buffers else ()
        receives = [_Receive(work, buffer, awaited=awaited) for work, buffer in pairs]
        buffers.clear()
        return receives or works

    with (
        replaced_call(_STAGE, "get_fwd_recv_ops", receive),
        replaced_call(f"{_PIPELINING}.schedules", "_batch_p2p", post),
    ):
        yield


RECEIVE_NOT_AWAITED = Defect(
    id="pipeline-receive-not-awaited",
    title="a stage computes with activations that may not have arrived yet",
    source="https://github.com/pytorch/pytorch/pull/196706",
    mechanism="the second stage of a rank does not wait for its receives, which were posted long before",
    laws=("STREAM-5",),
    cells=_LOOPED,
    inject=partial(receives_of_later_stages, awaited=False),
    inject_twin=partial(receives_of_later_stages, awaited=True),
)


@contextmanager
def sent_gradients(*, kept: bool) -> Iterator[None]:
    """Keep the gradients that a stage has sent until the next step, or none."""
    sent: list[Tensor] = []

    def send(original: Callable[..., list[Any]], stage: Any, bwd_chunk_id: int) -> list[Any]:
        transfers = original(stage, bwd_chunk_id)
        if bwd_chunk_id == 0:
            sent.clear()
        sent.extend(transfer.tensor for transfer in transfers if kept)
        return transfers

    with replaced_call(_STAGE, "get_bwd_send_ops", send):
        yield


SENT_GRADIENTS_KEPT = Defect(
    id="pipeline-sent-gradients-kept",
    title="a stage holds the gradients that it has sent until the step is over",
    source="https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    mechanism="`bwd_cache` keeps the gradients of the stage's inputs of all micro-batches",
    laws=("MEM-1", "MEM-6"),
    cells=_PLAIN_OR_GPIPE,
    inject=partial(sent_gradients, kept=True),
    inject_twin=partial(sent_gradients, kept=False),
)
