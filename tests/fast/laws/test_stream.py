"""STREAM-6 on traces: races fail with both places, and a trace without streams is an error."""

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.instruments.facts import IssuedOperator, StreamFacts, UnorderedOperators
from conformance.laws.schedule.test_stream import test_fully_shard_orders_conflicting_accesses_of_streams as stream_6
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell

GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
COPY_OUT = IssuedOperator("fsdp::split_with_sizes_copy", "default stream", ["torch/x.py:1 f", f"{GROUP}:463 wait"])
NORM = IssuedOperator("aten::_foreach_norm", "default stream", ["torch/nn/utils/clip_grad.py:95 norm", "a.py:1 b"])
GATHER = IssuedOperator("c10d::_allgather_base_", "all_gather_stream", [f"{GROUP}:407 unshard"])
USED = {"default stream": 3, "all_gather_stream": 1}


def judge(streams: StreamFacts | None) -> None:
    record = SimpleNamespace(ranks=[SimpleNamespace(rank=0, streams=streams)])
    run: Any = lambda _: record  # noqa: E731 - a fixture
    stream_6(run, Cell())


def test_a_trace_without_races_passes() -> None:
    judge(StreamFacts(USED, 1, []))


@pytest.mark.parametrize("streams", [None, StreamFacts({"default stream": 4}, 1, []), StreamFacts(USED, 0, [])])
def test_a_run_whose_streams_were_not_seen_is_an_error_of_the_suite(streams: StreamFacts | None) -> None:
    with pytest.raises(RuntimeError, match=r"torch \S+ asks the device for no streams"):
        judge(streams)


@pytest.mark.parametrize(
    ("first", "second", "reused", "text"),
    [
        (GATHER, COPY_OUT, False, rf"copy on default stream \({GROUP}:463 wait\) accesses the same memory as c10d::"),
        (
            COPY_OUT,
            GATHER,
            True,
            rf"_base_ on all_gather_stream \({GROUP}:407 unshard\) may be given the memory of fsdp",
        ),
        (
            GATHER,
            NORM,
            False,
            r"norm on default stream \(torch/nn/utils/clip_grad.py:95 norm, from a.py:1 b\) accesses",
        ),
    ],
)
def test_a_race_is_reported_with_both_places(
    first: IssuedOperator, second: IssuedOperator, reused: bool, text: str
) -> None:
    with pytest.raises(ConformanceFailure, match=text):
        judge(StreamFacts(USED, 1, [UnorderedOperators(first, second, reused)]))
