"""Schedule of a session, simulated: `python -m benchmarks.schedule REPORT_DIR`, for machines of any size.

The report of a session with one worker tells what each case ran and how long judging took. From that this program
computes how long the same cases take with other numbers of processors, devices and workers, in which order, and what
workers wait for. Cases are handed out as by pytest-xdist with `--maxschedchunk 1`: a worker holds the next case while
it judges one. A run has as many processors to itself as its world has ranks, or all of them; on devices the ranks of a
worker's last world keep theirs until another world needs them (see `conformance.run.pool`).
"""

import argparse
import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from tabulate import tabulate

from conformance.judge.registry import law_tests
from conformance.pytest_plugin.cases import FIRST_LAWS, dealt_position
from conformance.report.schema import CaseResult, read_report
from conformance.run.experiment import TRAINING
from conformance.run.record import RecordFile

MEASURED_ON = 2
"""Processors of the machine on which the report was made."""


@dataclass(frozen=True)
class Run:
    """Run of ranks that leaves a record."""

    name: str
    ranks: int
    seconds: float
    kind: str = ""
    """Only runs of one kind and world size can have the same processes."""
    is_simulated: bool = False
    """True if the ranks need no devices."""


@dataclass(frozen=True)
class Step:
    """Case with the runs whose records it needs, and the time to judge it."""

    law: str
    cell: str
    judging_s: float
    runs: tuple[Run, ...] = ()

    @property
    def seconds(self) -> float:
        """Duration if no other step has made one of the records."""
        return self.judging_s + sum(run.seconds for run in self.runs)


@dataclass(frozen=True)
class Place:
    """Machine and workers."""

    workers: int
    processors: int
    devices: int = 0
    """Devices for ranks; none if ranks run on processors."""
    world_start_s: float = 0.0
    """Time to start the ranks of a world on devices."""

    @property
    def slots(self) -> int:
        """Number of devices if ranks run on these, or else of processors."""
        return self.devices or self.processors

    def run_s(self, run: Run) -> float:
        """Return the duration of a run whose world has its slots to itself."""
        if self.devices and not run.is_simulated:
            return run.seconds * max(1.0, run.ranks / self.devices)
        return run.seconds * min(run.ranks, MEASURED_ON) / min(run.ranks, self.processors)


@dataclass
class Outcome:
    """Simulated session."""

    duration_s: float = 0.0
    """Duration from the first case to the last."""
    held_s: float = 0.0
    """Seconds for which runs held slots, summed over slots."""
    waited_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of waiting workers, by the reason."""
    worlds: int = 0
    """Worlds that were started on devices."""


@dataclass
class _Activity:
    left_s: float
    processors: int
    """Processors that the activity keeps busy."""


_Wait = Literal["another's run", "slots"]
_State = _Activity | _Wait


def simulate(steps: Sequence[Step], place: Place) -> Outcome:
    """Return the outcome of steps that workers take in this order."""
    session = _Session(steps, place)
    workers = [session.worker() for _ in range(place.workers)]
    states: dict[int, _State] = {}
    due = list(range(place.workers))
    while True:
        for number in due:
            state = next(workers[number], None)
            states.pop(number, None)
            if state is not None:
                states[number] = state
        if not states:
            return session.outcome
        waiting = [number for number, state in states.items() if not isinstance(state, _Activity)]
        if due and waiting and session.changed():
            due = waiting
            continue
        due = [*_pass_time(states, session.outcome, place), *waiting]


def _pass_time(states: dict[int, _State], outcome: Outcome, place: Place) -> list[int]:
    """Let time pass until an activity ends; returns the workers whose activity has ended.

    Where activities keep more processors busy than there are, all of them slow down alike.
    """
    active = {number: state for number, state in states.items() if isinstance(state, _Activity)}
    rate = min(1.0, place.processors / max(1, sum(each.processors for each in active.values())))
    passed_s = min(each.left_s for each in active.values()) / rate
    outcome.duration_s += passed_s
    for state in states.values():
        if not isinstance(state, _Activity):
            outcome.waited_s[state] += passed_s
    outcome.waited_s["nothing left"] += passed_s * (place.workers - len(states))
    for each in active.values():
        each.left_s -= passed_s * rate
    return [number for number, each in active.items() if each.left_s <= 1e-9]


class _Session:
    """Common state of the workers of a session: steps, records, slots and their queue."""

    def __init__(self, steps: Sequence[Step], place: Place) -> None:
        self.outcome = Outcome()
        self._steps, self._place = deque(steps), place
        self._held = iter([self._take(2) for _ in range(place.workers)])
        self._ended: dict[str, bool] = {}
        """Names of runs that have begun, with whether they have ended."""
        self._free, self._queue, self._changed = place.slots, deque[object](), False
        self._idle: list[Run] = []
        """Last runs of idle worlds that hold devices."""

    def changed(self) -> bool:
        """Return whether anything for which workers wait has changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def worker(self) -> Iterator[_State]:
        """Take steps until none is left; yields activities, and reasons to wait."""
        held = next(self._held)
        while held:
            step = held.popleft()
            for run in step.runs:
                yield from self._run(run)
            yield _Activity(step.judging_s, processors=1)
            held.extend(self._take(1))

    def _take(self, count: int) -> deque[Step]:
        return deque(self._steps.popleft() for _ in range(min(count, len(self._steps))))

    def _run(self, run: Run) -> Iterator[_State]:
        while not self._ended.get(run.name, True):
            yield "another's run"
        if run.name in self._ended:
            return
        self._ended[run.name] = False
        seconds = self._place.run_s(run)
        if self._place.devices and run.is_simulated:
            yield _Activity(seconds, processors=run.ranks)
        elif self._place.devices:
            yield from self._on_devices(run, seconds, slots=min(run.ranks, self._place.slots))
        else:
            yield from self._on_processors(seconds, slots=min(run.ranks, self._place.slots))
        self._ended[run.name] = self._changed = True

    def _on_processors(self, seconds: float, *, slots: int) -> Iterator[_State]:
        yield from self._slots(slots)
        yield _Activity(seconds, processors=slots)
        self._free += slots
        self.outcome.held_s += seconds * slots

    def _on_devices(self, run: Run, seconds: float, *, slots: int) -> Iterator[_State]:
        yield from self._world(run, slots)
        yield _Activity(seconds, processors=0)
        self._idle.append(run)
        self.outcome.held_s += seconds * slots

    def _slots(self, count: int) -> Iterator[_State]:
        """Wait for slots, in the order of asking; idle worlds release theirs."""
        ticket = object()
        self._queue.append(ticket)
        while self._queue[0] is not ticket or not self._can_have(count):
            yield "slots"
        self._queue.popleft()
        self._free -= count
        self._changed = True

    def _can_have(self, count: int) -> bool:
        while self._free < count and self._idle:
            self._free += min(self._idle.pop(0).ranks, self._place.slots)
        return self._free >= count

    def _world(self, run: Run, slots: int) -> Iterator[_State]:
        """Take an idle world of the run's kind, or start one.

        Workers share worlds here, which a session's do not: with several workers it starts more.
        """
        warm = next((each for each in self._idle if (each.kind, each.ranks) == (run.kind, run.ranks)), None)
        if warm is not None:
            self._idle.remove(warm)
            return
        yield from self._slots(slots)
        self.outcome.worlds += 1
        yield _Activity(self._place.world_start_s, processors=0)


# Orders: functions of steps in the order of the report, and of the number of workers.

Order = Callable[[Sequence[Step], int], list[Step]]


def as_reported(steps: Sequence[Step], workers: int) -> list[Step]:
    """Return the steps as they are: widest worlds first, cells together."""
    return list(steps)


def dealt(steps: Sequence[Step], workers: int) -> list[Step]:
    """Return the steps so that cases of as many cells alternate as there are workers."""
    cells = list(dict.fromkeys(step.cell for step in steps if step.law not in FIRST_LAWS))
    numbers = Counter[str]()
    keys: list[tuple[int, ...]] = []
    for step in steps:
        if step.law in FIRST_LAWS:
            keys.append((0,))
            continue
        keys.append((1, *dealt_position(cells.index(step.cell), numbers[step.cell], workers=workers)))
        numbers[step.cell] += 1
    return [steps[index] for index in sorted(range(len(steps)), key=lambda index: keys[index])]


def longest_cells_first(steps: Sequence[Step], workers: int) -> list[Step]:
    """Return the steps dealt, the longest cells first, of any world."""
    seconds: dict[str, float] = {}
    for step in steps:
        seconds[step.cell] = seconds.get(step.cell, 0.0) + step.seconds
    ordered = sorted(steps, key=lambda step: (step.law not in FIRST_LAWS, -seconds[step.cell]))
    return dealt(ordered, workers)


def longest_steps_first(steps: Sequence[Step], workers: int) -> list[Step]:
    """Return the steps, the longest first, for which durations of all cases would have to be known."""
    return sorted(steps, key=lambda step: -step.seconds)


def by_kind(steps: Sequence[Step], workers: int) -> list[Step]:
    """Return the steps by the kind of their first run, in the order of the report among those of one kind."""
    kinds: dict[str, str] = {}
    for step in steps:
        kinds.setdefault(step.cell, "")
        if step.runs and not kinds[step.cell]:
            kinds[step.cell] = f"{9 - step.runs[0].ranks} {step.runs[0].kind}"
    return dealt(sorted(steps, key=lambda step: (step.law not in FIRST_LAWS, kinds[step.cell])), workers)


ORDERS: tuple[Order, ...] = (as_reported, dealt, longest_cells_first, longest_steps_first, by_kind)


# Reports


def read_steps(directory: Path) -> list[Step]:
    """Return the steps of a report whose session had one worker, in the order in which they ended.

    The records of a case are the next ones in the order of writing. A law whose test takes `run` needs the record of
    its cell, whichever case has made it.
    """
    with (directory / "report.jsonl").open("rb") as lines:
        rows = [msgspec.json.decode(line) for line in lines]
    results = [msgspec.convert({k: v for k, v in row.items() if k != "type"}, CaseResult) for row in rows[1:-1]]
    made = deque(_runs(directory / "records"))
    trained = {run.name: run for run in made}
    needing = {law for law, test in law_tests().items() if "run" in inspect.signature(test).parameters}
    steps = []
    for result in results:
        own = [trained[result.cell]] if result.law in needing and result.cell in trained else []
        left_s = result.run_s
        while made and left_s >= made[0].seconds - 0.01:
            left_s -= made[0].seconds
            own.append(made.popleft())
        judging_s = max(0.0, result.duration_s - result.wait_s - result.run_s)
        steps.append(Step(result.law, result.cell, judging_s, tuple(dict.fromkeys(own))))
    if made:
        raise ValueError(f"{directory}: {len(made)} records were not made by its cases, one after another")
    return steps


def _runs(records: Path) -> Iterator[Run]:
    """Yield the runs of a directory in the order in which they ended; training runs have the names of their cells."""
    files = sorted(records.glob("*/record.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:
        record = msgspec.json.decode(file.read_bytes(), type=RecordFile)
        header = record.header
        is_training = header.experiment == TRAINING and not header.repeat
        ranks = header.cell.world_size if header.processes == "ranks" else 1
        kind = f"{header.cell.mesh} {sorted(header.cell.environment.items())}"
        name = header.cell.id if is_training else file.parent.name
        yield Run(name, ranks, record.run_s or 0.0, kind, is_simulated=header.substrate == "simulated")


def _row(steps: Sequence[Step], order: Order, place: Place) -> list[object]:
    outcome = simulate(order(steps, place.workers), place)
    longest = sorted(outcome.waited_s.items(), key=lambda item: -item[1])[:2]
    waits = [f"{name} {seconds:.0f}" for name, seconds in longest if seconds >= 1]
    return [
        place.processors if not place.devices else f"{place.devices} devices",
        place.workers,
        order.__name__,
        f"{outcome.duration_s:.0f}",
        f"{outcome.held_s / outcome.duration_s / place.slots:.0%}",
        outcome.worlds or "",
        ", ".join(waits),
    ]


def main() -> None:
    """Print simulated durations of a session's cases on machines of several sizes, in several orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, metavar="REPORT_DIR", help="report of a session with one worker")
    parser.add_argument("--world-start", type=float, default=6.0, metavar="S", help="start of ranks on devices")
    options = parser.parse_args()
    steps, report = read_steps(options.report), read_report(options.report)
    places = [Place(workers, count) for count in (2, 4, 8, 16) for workers in sorted({max(1, count // 4), count // 2})]
    places += [Place(max(1, count // 2), 64, count, options.world_start) for count in (1, 2, 4, 8)]
    rows = [_row(steps, order, place) for place in places for order in ORDERS]
    headers = ["processors", "workers", "order", "seconds", "held", "worlds", "workers waited for (seconds of all)"]
    print(tabulate(rows, headers=headers, tablefmt="github"))
    cases_s = sum(case.duration_s for case in report.cases)
    print(f"\nmeasured: {cases_s:.0f} s of cases, {report.duration_s - cases_s:.0f} s of start and end")


if __name__ == "__main__":
    main()
