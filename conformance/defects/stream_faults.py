"""Faults of FSDP2's streams: a wait, an event or a reference of torch's source is left out, one by one.

On the CPU nothing of it changes a run, since all operators run in the order of issue: only the trace of STREAM-6 shows
it. A twin does the same in another way, or twice. torch 2.13 has more waits; left out alone, these are no fault that a
trace could show.

Another wait stands in:
- `_root_pre_forward`: of `all_gather_stream` for computation. It waits for the copies, which have waited.
- `_post_forward`, `_wait_all_gather_streams_on_event`: of `all_gather_stream` for the copies out. The buffer belongs to
  the stream of the copies in, and the next all-gather waits for these.
- `_root_post_backward_final_callback`: for the last reduce-scatters. `finalize_backward` has waited for later events of
  that stream, or of the all-reduces, which had waited for it. Without a cast, a division or replicas the first stands
  in for the second as well: `gradients-before-reduce-scatter` leaves out both.
- the event behind an all-reduce: the one behind the whole reduction is recorded later on the same stream.
- the event of a reduce-scatter whose all-reduce is postponed: the next one adds to its result on the same stream.

The trainer does not come there:
- `_root_pre_forward`: for `set_post_optim_event`. `foreach_reduce`: for an all-reduce hook.
- `post_backward`: for a group of which only some modules ran. `_reset_iter_state`.
- `_wait_for_post_backward`: `finalize_backward` has waited, as long as each backward is the last one.
- `finalize_backward`: for an all-gather that nobody waited for.
- `Work.wait` of all-gathers with `async_op`. It is no event either, and no trace would have it.

The CPU has no such thing: the event behind a copy to pinned memory, and the host's waiting for it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from conformance.defects.edited_source import edited
from conformance.defects.injection import Defect

_STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
_ALIASED = "https://github.com/pytorch/pytorch/pull/180889"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
"""Module that calls the functions of `_fsdp_collectives`, and has imported them."""
_GROUP = f"{_COLLECTIVES}:FSDPParamGroup"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_LAWS = ("STREAM-6",)
_PLAIN = "id = dp2-fp32-default-meta and world = 2"
_REPLICAS = "id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1"
_CAST_ON_REPLICAS = "mesh = hsdp2x2 and precision = bf16-reduce"
_TWO_RANKS = "id in (dp4-fp32-k2-meta, dp4-bf16reduce-k2-layerwise-even-bpre1-from.same)"


def _statement(owner: str, name: str, statement: str, *, into: str = "pass", twin: str | None = None) -> dict[str, Any]:
    """Return what injects a defect that has `into` for a statement of torch; the twin has another, or it twice."""
    return {
        "inject": partial(edited, owner, name, statement, into=[into]),
        "inject_twin": partial(edited, owner, name, statement, into=[statement, statement] if twin is None else [twin]),
        "substrates": ("gloo",),
        "since": "2.13",
    }


COPY_OUT_BEFORE_ALL_GATHER = Defect(
    id="copy-out-before-all-gather",
    title="parameters are copied out of an all-gather that is under way",
    source=_STREAMS,
    mechanism="the stream of computation does not wait for the event behind the all-gather",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _COLLECTIVES, "foreach_all_gather_copy_out", "device_handle.current_stream().wait_event(all_gather_event)"
    ),
)
ALL_GATHER_NOT_RECORDED = Defect(
    id="all-gather-not-recorded",
    title="parameters are copied out behind an event that nobody recorded",
    source=_STREAMS,
    mechanism="waiting for an event that was never recorded delays nothing",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _COLLECTIVES,
        "foreach_all_gather",
        "all_gather_event = all_gather_stream.record_event()",
        into="all_gather_event = device_handle.Event()",
    ),
)
ALL_GATHER_BEFORE_COPY_IN = Defect(
    id="all-gather-before-copy-in",
    title="shards are gathered before they are copied into the buffer",
    source=_STREAMS,
    mechanism="the stream of the all-gather does not wait for that of the copies",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_COLLECTIVES, "foreach_all_gather", "all_gather_stream.wait_stream(all_gather_copy_in_stream)"),
)
COPY_IN_BEFORE_OPTIMIZER = Defect(
    id="copy-in-before-optimizer",
    title="shards are gathered while the optimizer may be writing them",
    source=_STREAMS,
    mechanism="the stream of the copies does not wait for that of computation when forward begins",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_STATE, "_root_pre_forward", "self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)"),
)
GATHERED_RELEASED_IN_FORWARD = Defect(
    id="gathered-released-in-forward",
    title="in forward, the buffer of an all-gather is reused while parameters are copied out of it",
    source=_STREAMS,
    mechanism="the stream that it was allocated on does not wait for the copies before it is released",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_GROUP, "wait_for_unshard", "self._wait_all_gather_streams_on_event(prev_all_gather_state.event)"),
)
GATHERED_NOT_KEPT = Defect(
    id="gathered-not-kept",
    title="in forward, the buffer of an all-gather is released as soon as the copies out of it are issued",
    source=_STREAMS,
    mechanism="nothing refers to it until the next group has waited",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _GROUP,
        "wait_for_unshard",
        "self.comm_ctx.all_gather_state = AllGatherState(self._all_gather_result, all_gather_copy_out_event)",
        twin="self._wait_all_gather_streams_on_event(all_gather_copy_out_event)",
    ),
)
LAST_GATHERED_RELEASED = Defect(
    id="last-gathered-released",
    title="after forward, the buffer of the last all-gather is reused while parameters are copied out of it",
    source=_STREAMS,
    mechanism="the stream that it was allocated on does not wait for the copies before it is released",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _STATE, "_post_forward", "self._comm_ctx.all_gather_copy_in_stream.wait_event(all_gather_state.event)"
    ),
)
GATHERED_RELEASED_IN_BACKWARD = Defect(
    id="gathered-released-in-backward",
    title="in backward, the buffer of an all-gather is reused while parameters are copied out of it",
    source=_STREAMS,
    mechanism="the stream that it was allocated on does not wait for the copies before it is released",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_GROUP, "wait_for_unshard", "self._wait_all_gather_streams_on_event(all_gather_copy_out_event)"),
)
COPY_OUT_NOT_RECORDED = Defect(
    id="copy-out-not-recorded",
    title="buffers of all-gathers are released behind an event that nobody recorded",
    source=_STREAMS,
    mechanism="waiting for an event that was never recorded delays nothing",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_GROUP, "wait_for_unshard", "all_gather_copy_out_event.record()"),
)
REDUCE_SCATTER_BEFORE_COPY_IN = Defect(
    id="reduce-scatter-before-copy-in",
    title="gradients are reduced before they are computed and copied into the buffer",
    source=_STREAMS,
    mechanism="the stream of the reduce-scatter does not wait for that of computation",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_COLLECTIVES, "foreach_reduce", "reduce_scatter_stream.wait_stream(current_stream)"),
)
REDUCED_RELEASED = Defect(
    id="reduced-released",
    title="the input of a reduce-scatter is reused while the reduce-scatter is under way",
    source=_STREAMS,
    mechanism="the stream that it was allocated on does not wait for the reduce-scatter before it is released",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(_GROUP, "post_backward", "self.device_handle.current_stream().wait_event(oldest.event)"),
)
REDUCED_NOT_KEPT = Defect(
    id="reduced-not-kept",
    title="the input of a reduce-scatter is released as soon as the reduce-scatter is issued",
    source=_STREAMS,
    mechanism="nothing refers to it until the next group has waited",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _GROUP,
        "post_backward",
        "self.comm_ctx.reduce_scatter_states.append(ReduceScatterState(reduce_scatter_input, reduce_scatter_event))",
        twin="self.device_handle.current_stream().wait_event(reduce_scatter_event)",
    ),
)
REDUCE_SCATTER_NOT_RECORDED = Defect(
    id="reduce-scatter-not-recorded",
    title="inputs of reduce-scatters are released behind an event that nobody recorded",
    source=_STREAMS,
    mechanism="waiting for an event that was never recorded delays nothing",
    laws=_LAWS,
    cells=_PLAIN,
    **_statement(
        _COLLECTIVES,
        "foreach_reduce",
        "reduce_scatter_event = reduce_scatter_stream.record_event()",
        into="reduce_scatter_event = device_handle.Event()",
    ),
)
ALL_REDUCE_BEFORE_REDUCE_SCATTER = Defect(
    id="all-reduce-before-reduce-scatter",
    title="gradients are reduced over replicas before they are reduced over shards",
    source=_STREAMS,
    mechanism="the stream of the all-reduce does not wait for that of the reduce-scatter",
    laws=_LAWS,
    cells=_REPLICAS,
    **_statement(_COLLECTIVES, "foreach_reduce", "all_reduce_stream.wait_stream(reduce_scatter_stream)"),
)
GRADIENTS_BEFORE_ALL_REDUCE = Defect(
    id="gradients-before-all-reduce",
    title="gradients are clipped and used while they are reduced over replicas",
    source=_STREAMS,
    mechanism="at the end of backward, the stream of computation does not wait for the reductions",
    laws=_LAWS,
    cells=_REPLICAS,
    **_statement(_GROUP, "finalize_backward", "self.device_handle.current_stream().wait_event(event)"),
)
REDUCTION_NOT_RECORDED = Defect(
    id="reduction-not-recorded",
    title="gradients are clipped and used behind an event that nobody recorded",
    source=_STREAMS,
    mechanism="waiting for an event that was never recorded delays nothing",
    laws=_LAWS,
    cells=_REPLICAS,
    **_statement(
        _COLLECTIVES,
        "foreach_reduce",
        "post_reduce_event = post_reduce_stream.record_event()",
        into="post_reduce_event = device_handle.Event()",
    ),
)
ALL_REDUCED_NOT_KEPT = Defect(
    id="all-reduced-not-kept",
    title="the buffer of an all-reduce is reused by the next group's reduce-scatter while it is under way",
    source=_ALIASED,
    mechanism="nothing refers to the buffer in reduce_dtype once its cast to the dtype of gradients is issued",
    laws=_LAWS,
    cells=_CAST_ON_REPLICAS,
    **_statement(
        _GROUP,
        "post_backward",
        "self._all_reduce_state = AllReduceState(all_reduce_input, all_reduce_event)",
        twin="self.comm_ctx.reduce_scatter_stream.wait_event(self._post_reduce_event)",
    ),
)
RESHARDED_NOT_AWAITED = Defect(
    id="resharded-not-awaited",
    title="after resharding to two ranks, shards are gathered before they are written",
    source=_STREAMS,
    mechanism="the stream of the copies does not wait for the event behind the resharding",
    laws=_LAWS,
    cells=_TWO_RANKS,
    **_statement(_GROUP, "unshard", "self._wait_all_gather_streams_on_event(self._reshard_after_forward_event)"),
)
RESHARDING_NOT_RECORDED = Defect(
    id="resharding-not-recorded",
    title="after resharding to two ranks, shards are gathered behind an event that nobody recorded",
    source=_STREAMS,
    mechanism="waiting for an event that was never recorded delays nothing",
    laws=_LAWS,
    cells=_TWO_RANKS,
    **_statement(_GROUP, "reshard", "self._reshard_after_forward_event.record()"),
)

_LAST_WAITS = (
    (_GROUP, "finalize_backward", "self.device_handle.current_stream().wait_event(event)"),
    (_STATE, "_root_post_backward_final_callback", "self._device_handle.current_stream().wait_event(rs_state.event)"),
)
"""Waits at the end of backward, for all reductions and for the inputs of the last reduce-scatters."""


@contextmanager
def last_waits(*, times: int) -> Iterator[None]:
    """End backward with this many of both waits: without a cast or replicas, one stands in for the other."""
    with ExitStack() as stack:
        for owner, name, statement in _LAST_WAITS:
            stack.enter_context(edited(owner, name, statement, into=[statement] * times))
        yield


GRADIENTS_BEFORE_REDUCE_SCATTER = Defect(
    id="gradients-before-reduce-scatter",
    title="gradients are clipped and used while they are reduced",
    source=_STREAMS,
    mechanism="at the end of backward, the stream of computation waits for nothing",
    laws=("STREAM-6",),
    cells=_PLAIN,
    inject=partial(last_waits, times=0),
    inject_twin=partial(last_waits, times=2),
    substrates=("gloo",),
    since="2.13",
)
