"""Report of an exploration as text."""

from collections.abc import Iterator
from pathlib import Path

from conformance.sim.recorded import Place
from conformance.sim_runs.races.findings import Difference, Exploration, Issued, Pair

_SHOWN_PAIRS = 20


def text(exploration: Exploration) -> str:
    """Return the report."""
    return "\n".join(_lines(exploration))


def _lines(exploration: Exploration) -> Iterator[str]:
    processes = ", ".join(exploration.processes)
    yield f"{len(exploration.runs)} schedules of {' '.join(exploration.command)}"
    yield f"{exploration.operators} operators ({processes}); one run took {exploration.runs[0].duration_s:.1f} s"
    yield from _nondeterminism(exploration)
    yield from _bits(exploration)
    yield from _pairs(exploration)
    yield from _held(exploration)
    for place in exploration.queries:
        yield f"{_at(place)} asks whether a stream or an event is done: the answer depends on the schedule"
    yield from _coverage(exploration)


def _nondeterminism(exploration: Exploration) -> Iterator[str]:
    if exploration.nondeterministic:
        yield "two eager runs differ, so that differences under other schedules show nothing:"
        yield from (f"  {_difference(difference)}" for difference in exploration.nondeterministic)


def _bits(exploration: Exploration) -> Iterator[str]:
    failing = [run for run in exploration.runs if run.differences]
    if not failing:
        yield "bits: the same under all schedules"
        return
    yield f"bits: other than eagerly under {', '.join(run.schedule for run in failing)}"
    for difference in failing[0].differences:
        yield f"  {failing[0].schedule}: {_difference(difference)}"
    if failing[0].ending:
        yield from (f"    | {line}" for line in failing[0].ending.splitlines())
    smallest = exploration.smallest
    if smallest is None:
        yield "  no smaller schedule: no range of delayed operators changes bits"
    elif len(smallest.delayed) == 1:
        yield f"  smallest schedule: {smallest.schedule}, {smallest.process}: delaying one operator suffices,"
        yield f"    {_issued(smallest.delayed[0])}"
    else:
        yield f"  smallest schedule: {smallest.schedule}, {smallest.process}: delaying the operators from"
        yield f"    {_issued(smallest.delayed[0])} to"
        yield f"    {_issued(smallest.delayed[1])}"
    explaining = [str(index + 1) for index in exploration.explained_by]
    yield f"  explained by unordered pair {', '.join(explaining)}" if explaining else "  no unordered pair explains it"


def _pairs(exploration: Exploration) -> Iterator[str]:
    if not exploration.pairs:
        yield "unordered pairs: none"
        return
    yield "unordered pairs: these access the same bytes, one of them writes, and no event orders them"
    changing = {run.schedule for run in exploration.runs if run.differences}
    for number, pair in enumerate(exploration.pairs[:_SHOWN_PAIRS], 1):
        yield f"  {number}. {_members(pair)}"
        yield from _pair(pair)
        yield f"     {_inverted(pair, changing)}"
    yield from _more(exploration.pairs)


def _members(pair: Pair) -> str:
    count = sum(map(len, pair.members.values()))
    return ", ".join(pair.members) + (f": {count} pairs, the first" if count > 1 else "")


def _pair(pair: Pair) -> Iterator[str]:
    yield f"     {_issued(pair.first)}"
    if pair.is_reuse:
        yield f"     its memory is released at {_at(pair.released)} and may next be given to"
    yield f"     {_issued(pair.second)}"


def _inverted(pair: Pair, changing: set[str]) -> str:
    if not pair.inverted_under:
        return "no schedule of these ran it the other way round"
    shown = [f"{schedule} (other bits)" if schedule in changing else schedule for schedule in pair.inverted_under]
    return f"the other way round under {', '.join(shown)}"


def _more(pairs: list[Pair]) -> Iterator[str]:
    if len(pairs) > _SHOWN_PAIRS:
        yield f"  and {len(pairs) - _SHOWN_PAIRS} more, in the JSON file"


def _held(exploration: Exploration) -> Iterator[str]:
    if exploration.held_by_waits:
        yield "ordered only because the host waits for a number, a copy or all streams:"
    for pair in exploration.held_by_waits[:_SHOWN_PAIRS]:
        yield f"  {_members(pair)}, wait at {_at(pair.wait)}"
        yield from _pair(pair)
    yield from _more(exploration.held_by_waits)


def _coverage(exploration: Exploration) -> Iterator[str]:
    coverage = exploration.coverage
    yield f"coverage: {coverage.orders} distinct orders of execution in {coverage.runs} runs"
    if coverage.pairs:
        yield f"  {coverage.pair_orders} distinct orders of the {coverage.pairs} unordered pairs"
    else:
        yield "  no accesses are unordered: no legal schedule of this sequence of operators gives other bits"


def _difference(difference: Difference) -> str:
    place = f" at {_at(difference.place)}" if difference.place else ""
    more = f" (and {difference.count - 1} more)" if difference.count > 1 else ""
    return f"{difference.process}: {difference.what}{place}{more}"


def _issued(issued: Issued) -> str:
    number = f" (operator {issued.number})" if issued.number else ""
    node = f" in {issued.node}" if issued.node else ""
    inner = f", in {_at(issued.torch)}" if issued.torch else ""
    return f"{issued.operator}{number} on {issued.stream}: {_at(issued.program)}{node}{inner}"


def _at(place: Place | None) -> str:
    if place is None:
        return "an unknown line"
    file = Path(place.file)
    installed = place.file.rpartition("/site-packages/")[2]
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else installed
    return f"{shown}:{place.line} ({place.function})"
