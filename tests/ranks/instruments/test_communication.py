"""Communication of a step: arithmetic of intervals, traces made up, and a profile of real ranks."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from conformance.experiments.context import RankWorld
from conformance.experiments.training import profiled_step
from conformance.instruments.communication import EXCLUDED, Communication, communication, length, uncovered, union
from conformance.instruments.profiler_trace import Span, read_trace
from conformance.instruments.timing import StepProfile
from conformance.plan.cells import Cell
from conformance.run.experiment import job_of
from conformance.run.pool import Pools
from conformance.run.ranks.messages import RankContext, Task

RANK, BACKEND = 7, 8
INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def ticks(intervals: list[tuple[int, int]]) -> set[int]:
    """Return the integers at which the unit intervals inside of these intervals begin."""
    return {tick for start, end in intervals for tick in range(start, end)}


@given(INTERVALS)
def test_a_union_covers_the_same_time(some: list[tuple[int, int]]) -> None:
    merged = union(some)
    assert length(merged) == len(ticks(some))
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert all(start < end for start, end in merged)


@given(INTERVALS, INTERVALS)
def test_uncovered_time_is_the_difference(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert uncovered(some, by=others) == len(ticks(some) - ticks(others))


def span(name: str, start: float, end: float, *, cat: str = "cpu_op", tid: int = RANK, ph: str = "X") -> Span:
    return Span(name=name, cat=cat, ph=ph, ts=start, dur=end - start, tid=tid)


def measured(*spans: Span, on_device: bool, step_us: float = 100.0) -> tuple[float, float]:
    """Return busy and exposed communication in microseconds."""
    times = communication(spans, step_s=step_us * 1e-6, thread=RANK, on_device=on_device)
    assert 0.0 <= times.exposed_s <= times.busy_s
    return round(times.busy_s * 1e6, 3), round(times.exposed_s * 1e6, 3)


def kernel(name: str, start: float, end: float, *, stream: int = 0) -> Span:
    return span(name, start, end, cat="kernel", tid=stream)


def test_kernels_hide_collectives_on_a_device() -> None:
    gather = kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 30, stream=1)
    reduce = kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 25, 45, stream=2)
    product = kernel("ampere_sgemm_128x64_tn", 20, 40)
    assert measured(gather, reduce, product, on_device=True) == (35.0, 15.0)
    assert measured(gather, on_device=True) == (20.0, 20.0)
    assert measured(gather, span("aten::mm", 0, 100), on_device=True) == (20.0, 20.0)  # issued, not computed
    assert measured(product, on_device=True) == (0.0, 0.0)


def test_operators_of_the_rank_hide_collectives_on_the_cpu() -> None:
    gather = span("gloo:all_gather", 10, 30, cat="user_annotation", tid=BACKEND)
    assert measured(gather, span("aten::mm", 25, 50), on_device=False) == (20.0, 15.0)
    assert measured(gather, span("aten::copy_", 0, 90, tid=BACKEND), on_device=False) == (20.0, 20.0)  # gloo's own
    assert measured(gather, span("autograd::engine::evaluate_function", 0, 90), on_device=False) == (20.0, 20.0)
    assert measured(gather, span("aten::mm", 25, 50, ph="s"), on_device=False) == (20.0, 20.0)  # an arrow


def test_the_work_of_instruments_is_excluded() -> None:
    gather, other = (span("gloo:all_gather", start, start + 20, tid=BACKEND) for start in (10, 60))
    excluded = span(EXCLUDED, 50, 90, cat="user_annotation")
    times = communication([gather, other, excluded], step_s=100e-6, thread=RANK, on_device=False)
    assert times == Communication(step_s=60e-6, busy_s=20e-6, exposed_s=20e-6)
    assert times.exposed_share == pytest.approx(1 / 3)


def test_a_trace_is_read_from_what_a_profiler_writes(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        json.loads("1")
    assert read_trace(profiler.export_chrome_trace)
    rows = [{"ph": "M", "name": "process_name", "pid": 1, "tid": "", "args": {"name": "python"}}, {"ph": "i", "s": "g"}]
    spans = read_trace(lambda file: Path(file).write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows})))
    assert spans == [Span(name="process_name", ph="M", tid=""), Span(ph="i")]


def test_without_a_step_nothing_is_profiled() -> None:
    profiled = StepProfile(None)
    profiled.begin(0)
    with profiled.excluded():
        pass
    profiled.end(0)
    assert profiled.communication is None


def test_real_ranks_expose_communication(pools: Pools) -> None:
    task = Task("tests.support.pool_tasks:profiled_step", {})
    for result in pools.run(task, world_size=2, deadline_s=60.0):
        times = msgspec.convert(result, Communication)
        assert 0 < times.exposed_s <= times.busy_s < times.step_s


@pytest.mark.parametrize(
    ("device", "rank", "defect", "steps", "expected"),
    [
        ("GPU-1", 0, None, 3, 2),
        ("", 0, None, 3, None),
        ("GPU-1", 1, None, 3, None),
        ("GPU-1", 0, "d", 3, None),
        ("GPU-1", 0, None, 1, None),
    ],
)
def test_the_last_step_on_a_device_is_profiled(
    device: str, rank: int, defect: str | None, steps: int, expected: int | None
) -> None:
    context = RankContext(rank=rank, world_size=2, rendezvous="", timeout_s=1.0, device=device)
    job = job_of(Cell(steps=steps), Path(), defect=defect)
    assert profiled_step(RankWorld(context, job, job.config, torch.device("cpu"))) == expected
