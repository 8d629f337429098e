"""How long a step communicates, and for how much of that nothing is computed, from a trace of torch's profiler.

What is asked of a trace are the documented fields of Chrome's format (`name`, `cat`, `ph`, `ts` and `dur` in
microseconds, `tid`), and the names that torch and NCCL give: `kernel` is the category of what runs on a device, and
NCCL's kernels begin with `nccl`; `gloo:all_gather` spans an operation of gloo until it has ended, in a thread of gloo.
https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler.profile.export_chrome_trace
No torch is needed here: the report, whose process has none, reads the same figures.
"""

from collections.abc import Iterable, Sequence

import msgspec

Interval = tuple[float, float]
"""From, and until."""

_MICROSECOND = 1e-6
_COMPUTES_ON_CPU = ("aten::", "fsdp::")


EXCLUDED = "conformance: excluded"
"""Name of spans in which instruments work: they are no part of the step."""


class Span(msgspec.Struct):
    """One event of a trace; those that last have all of these."""

    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank in one step."""

    step_s: float
    busy_s: float
    """In which at least one collective was under way."""
    exposed_s: float
    """In which, besides, nothing was computed: no kernel but those of collectives ran; on the CPU, no operator in the
    thread of the rank. There, what compiled code computes is not seen."""

    @property
    def exposed_share(self) -> float:
        """Of the step."""
        return self.exposed_s / self.step_s if self.step_s > 0 else 0.0


def communication(spans: Iterable[Span], *, step_s: float, thread: int, on_device: bool) -> Communication:
    """Of a step that took `step_s` with all that is `EXCLUDED`; `thread` is the rank's own."""
    lasting = [span for span in spans if span.ph == "X"]
    of_kind = _on_device if on_device else _on_cpu
    transfers, computing = of_kind(lasting, thread)
    apart = [_interval(span) for span in lasting if span.name == EXCLUDED]
    return Communication(
        step_s=round(step_s - length(union(apart)) * _MICROSECOND, 6),
        busy_s=round(uncovered(transfers, by=apart) * _MICROSECOND, 6),
        exposed_s=round(uncovered(transfers, by=[*computing, *apart]) * _MICROSECOND, 6),
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
    """The same moments in intervals that neither overlap nor touch, in their order; empty ones are left out."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(apart: Iterable[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - start for start, end in apart)


def uncovered(intervals: Iterable[Interval], *, by: Iterable[Interval]) -> float:
    """How long it is that one of `intervals` lasts and none of `by` does."""
    mine, others = union(intervals), union(by)
    both = union([*mine, *others])
    return length(both) - length(others)
