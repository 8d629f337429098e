"""Communication time of a step, and the part without overlapping computation, from torch's profiler.

Events have the documented fields of Chrome's format (`name`, `cat`, `ph`, `ts` and `dur` in microseconds, `tid`), and
the names that torch and NCCL give: `kernel` is the category of kernels of a device, and those of NCCL begin with
`nccl`; `gloo:all_gather` spans an operation of gloo until it has ended, in a thread of gloo.
https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler.profile.export_chrome_trace No torch is needed here:
the report, whose process has none, reads the same metrics.
"""

from collections.abc import Iterable, Sequence

import msgspec

from conformance.instruments.profiler_trace import Span

Interval = tuple[float, float]
"""Start and end."""

EXCLUDED = "conformance: excluded"
"""Name of the spans in which instruments work: they do not belong to the step."""
_MICROSECOND_S = 1e-6
_COMPUTES_ON_CPU = ("aten::", "fsdp::")


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one step on one rank, and how much of it is communication."""

    step_s: float
    """Duration of the step."""
    busy_s: float
    """Time in which at least one collective is under way."""
    exposed_s: float
    """Time in which a collective is under way, without computation.

    No kernel but those of collectives runs; on the CPU, no operator in the thread of the rank. On the CPU the
    computation of compiled code is not seen.
    """

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step, from 0 to 1."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


def communication(spans: Iterable[Span], *, step_s: float, thread: int, on_device: bool) -> Communication:
    """Return the communication of a step from the spans of its trace.

    `step_s` is the duration of the step including the spans EXCLUDED, `thread` the rank's own thread.
    """
    lasting = [span for span in spans if span.ph == "X"]
    transfers, computing = (_on_device if on_device else _on_cpu)(lasting, thread)
    excluded = [_interval(span) for span in lasting if span.name == EXCLUDED]
    return Communication(
        step_s=round(step_s - length(union(excluded)) * _MICROSECOND_S, 6),
        busy_s=round(uncovered(transfers, by=excluded) * _MICROSECOND_S, 6),
        exposed_s=round(uncovered(transfers, by=[*computing, *excluded]) * _MICROSECOND_S, 6),
    )


def _on_device(spans: Sequence[Span], _thread: int) -> tuple[list[Interval], list[Interval]]:
    kernels = [span for span in spans if span.cat == "kernel"]
    nccl = [_interval(span) for span in kernels if span.name.startswith("nccl")]
    return nccl, [_interval(span) for span in kernels if not span.name.startswith("nccl")]


def _on_cpu(spans: Sequence[Span], thread: int) -> tuple[list[Interval], list[Interval]]:
    gloo = [_interval(span) for span in spans if span.name.startswith("gloo:")]
    computes = [span for span in spans if span.tid == thread and span.name.startswith(_COMPUTES_ON_CPU)]
    return gloo, [_interval(span) for span in computes]


def _interval(span: Span) -> Interval:
    return span.ts, span.ts + span.dur


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals that cover the same points in time, in ascending order, and neither overlap nor touch.

    Empty intervals are left out.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of intervals that do not overlap."""
    return sum(end - start for start, end in disjoint)


def uncovered(intervals: Iterable[Interval], *, by: Iterable[Interval]) -> float:
    """Return the total length of `intervals` outside of all intervals in `by`."""
    covering = union(by)
    either = union([*intervals, *covering])
    return length(either) - length(covering)
