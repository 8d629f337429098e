"""Exploration of a program: runs under several schedules, compared with the eager one, and the check of its trace."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from conformance.sim_runs.races.differences import differences
from conformance.sim_runs.races.findings import Coverage, Exploration, Pair, ScheduleRun, Smallest
from conformance.sim_runs.races.program import Program
from conformance.sim_runs.races.runs import Run, run_under
from conformance.sim_runs.races.smallest import smallest_delay
from conformance.sim_runs.races.unordered import Group, groups, key
from reference_trainer.checks import UsageError

LIMIT_S = 600.0
"""Default time limit of one run."""
_SEARCH_RUNS, _CANDIDATES = 40, 8
"""Runs of the search for the smallest schedule, and operators of unordered pairs that it tries by themselves."""


class DeviceUnused(UsageError):
    """No process of the eager run has used the device and come to its end."""

    def __init__(self, run: Run, command: Sequence[str]) -> None:
        super().__init__(f"no process of {' '.join(command)} ended and used the device:\n{run.ending}")
        self.run = run


Report = Callable[[str], None]


def explore(
    command: Sequence[str],
    schedules: int,
    *,
    environment: Mapping[str, str] = os.environ,
    limit_s: float = LIMIT_S,
    working_directory: Path | None = None,
    report: Report = lambda line: None,
) -> Exploration:
    """Run a command under several schedules of the simulated device, and return everything that differs or may.

    The command is a program and its arguments, such as `python script.py`, `torchrun ...` or `pytest ...`, whose
    processes get the device from the environment. The schedules are eager, lazy, each stream starved, and random ones
    up to `schedules`; `report` is called with a line for each run. The eager run happens twice, to see whether the
    program is deterministic. Raises DeviceUnused if no process of the eager run uses the device.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-races-") as directory:
        search = _Search(command, Path(directory), environment, limit_s, working_directory, report)
        return search.explore(schedules)


class _Inverted(NamedTuple):
    """Unordered pair that a run executed the other way round than it was issued."""

    group: object
    """Key of the pair's operators, streams and lines."""
    process: str
    first: int
    second: int


class _Outcome(NamedTuple):
    """Run, without its traces."""

    summary: ScheduleRun
    order: int
    """Hash of the order of execution of all processes."""
    inverted: frozenset[_Inverted]

    @property
    def differs(self) -> bool:
        """True if bits, or the end, are not those of the eager run."""
        return bool(self.summary.differences)


class _Pairs:
    """Unordered pairs of all processes, in the order in which they were found."""

    def __init__(self) -> None:
        self._first: dict[object, Pair] = {}

    def __len__(self) -> int:
        return sum(len(numbers) for pair in self._first.values() for numbers in pair.members.values())

    def add(self, process: str, found: Iterable[Group]) -> None:
        """Add the pairs of a process, unless those with the same operators, streams and lines are known there."""
        for group in found:
            self._first.setdefault(key(group.pair), group.pair).members.setdefault(process, group.numbers)

    def inverted(self, run: Run) -> frozenset[_Inverted]:
        """Return the pairs of operators that a run executed the other way round."""
        ranks = {name: _ranks(program) for name, program in run.programs.items()}
        return frozenset(
            _Inverted(group, process, *numbers)
            for group, pair in self._first.items()
            for process, members in pair.members.items()
            for numbers in members
            if _is_inverted(*numbers, ranks.get(process, {}))
        )

    def described(self, outcomes: Sequence[_Outcome]) -> list[Pair]:
        """Return the pairs with the schedules that ran them the other way round."""
        inverted = [(outcome.summary.schedule, {pair.group for pair in outcome.inverted}) for outcome in outcomes]
        return [
            replace(pair, inverted_under=[schedule for schedule, groups in inverted if group in groups])
            for group, pair in self._first.items()
        ]

    def first_operators(self, inverted: Iterable[_Inverted]) -> list[int]:
        """Return the first operator that was inverted in the pairs of each kind."""
        first: dict[object, int] = {}
        for pair in sorted(inverted, key=lambda pair: pair.first):
            first.setdefault(pair.group, pair.first)
        return [*dict.fromkeys(first[group] for group in self._first if group in first)]

    def indices(self, inverted: Iterable[_Inverted], delayed: range) -> list[int]:
        """Return the indices of pairs among those that were inverted; those that a delay explains, if there are any."""
        by_delay = {pair.group for pair in inverted if pair.first in delayed}
        explaining = by_delay or {pair.group for pair in inverted}
        return [index for index, group in enumerate(self._first) if group in explaining]


class _Search:
    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        limit_s: float,
        working_directory: Path | None,
        report: Report,
    ) -> None:
        self._command, self._directory, self._environment = list(command), directory, dict(environment)
        self._limit_s, self._working_directory, self._report = limit_s, working_directory, report
        self._pairs, self._held = _Pairs(), _Pairs()

    def explore(self, schedules: int) -> Exploration:
        self._eager = eager = self._run("eager")
        if not eager.programs:
            raise DeviceUnused(eager, self._command)
        again = differences(eager, self._run("eager"))
        for name, program in eager.programs.items():
            free, held = groups(program)
            self._pairs.add(name, free)
            self._held.add(name, held)
        outcomes = [self._outcome(eager)]
        outcomes += [self._outcome(self._run(schedule)) for schedule in _after_eager(eager, schedules)]
        failing = [outcome for outcome in outcomes if outcome.differs]
        smallest, shortest = None, failing[0] if failing else outcomes[0]
        delayed = range(0)
        if failing and not again and (found := self._smallest(failing[0])):
            smallest, shortest, delayed = found
        return Exploration(
            command=self._command,
            processes=[*eager.programs],
            operators=sum(len(program.positions) for program in eager.programs.values()),
            runs=[outcome.summary for outcome in outcomes],
            nondeterministic=again,
            pairs=self._pairs.described(outcomes),
            held_by_waits=self._held.described([]),
            queries=[*dict.fromkeys(place for program in eager.programs.values() for place in program.queries())],
            smallest=smallest,
            explained_by=self._pairs.indices(shortest.inverted, delayed),
            coverage=Coverage(
                runs=len(outcomes),
                orders=len({outcome.order for outcome in outcomes}),
                pairs=len(self._pairs),
                pair_orders=len({outcome.inverted for outcome in outcomes}),
            ),
        )

    def _run(self, schedule: str) -> Run:
        directory = self._directory / "run"  # the same path for each run, which a program may see
        run = run_under(
            schedule,
            self._command,
            directory,
            environment=self._environment,
            limit_s=self._limit_s,
            working_directory=self._working_directory,
        )
        shutil.rmtree(directory, ignore_errors=True)
        self._report(f"{schedule}: status {run.status}, {run.duration_s:.1f} s")
        return run

    def _outcome(self, run: Run) -> _Outcome:
        """Compare a run with the eager one, and its order of execution with that of the trace."""
        early = self._early(run)
        differing = [] if run is self._eager else differences(self._eager, run)
        ending = run.ending if run.status != self._eager.status else ""
        order = hash(tuple((name, *program.recorded.order) for name, program in run.programs.items()))
        summary = ScheduleRun(run.schedule, run.status, run.duration_s, differing, ending)
        return _Outcome(summary, order, self._pairs.inverted(run) | early)

    def _early(self, run: Run) -> frozenset[_Inverted]:
        """Return the pairs in which the host came before a copy; only the trace of a run where it did has them."""
        found = [
            (name, group)
            for name, program in run.programs.items()
            if any(entry.kind == "host" for entry in program.trace)
            for group in groups(program)[0]
            if not group.pair.second.number
        ]
        for name, group in found:
            self._pairs.add(name, [group])
        return frozenset(
            _Inverted(key(group.pair), name, *numbers) for name, group in found for numbers in group.numbers
        )

    def _smallest(self, failing: _Outcome) -> tuple[Smallest, _Outcome, range] | None:
        """Return the smallest range of delayed operators that changes bits, and its run."""
        tried: dict[tuple[int, int], _Outcome] = {}

        def differs(first: int, last: int) -> bool:
            outcome = tried[first, last] = self._outcome(self._run(f"delay:{first}-{last}"))
            return outcome.differs

        candidates = self._pairs.first_operators(failing.inverted)[:_CANDIDATES]
        programs = self._eager.programs
        last = max(max(program.positions) for program in programs.values())
        found = smallest_delay(differs, candidates, last, runs=_SEARCH_RUNS)
        if found is None:
            return None
        outcome = tried[found]
        in_pairs = sorted(pair.process for pair in outcome.inverted)
        changed = [difference.process for difference in outcome.summary.differences]
        process = next(name for name in (*in_pairs, *changed, *programs) if name in programs)
        delayed = [programs[process].operator(number) for number in dict.fromkeys(found)]
        smallest = Smallest(outcome.summary.schedule, failing.summary.schedule, delayed, process, len(tried))
        return smallest, outcome, range(found[0], found[1] + 1)


def _after_eager(eager: Run, schedules: int) -> list[str]:
    """Return the schedules beside the eager one: lazy, each stream starved, and random ones up to a number of all."""
    streams = max(sum(entry.kind == "stream" for entry in program.trace) for program in eager.programs.values())
    systematic = ["lazy", *(f"starve:{number}" for number in range(1, streams + 1))][: max(schedules - 1, 0)]
    return [*systematic, *(f"random:{seed}" for seed in range(1, schedules - len(systematic)))]


def _ranks(program: Program) -> dict[int, int]:
    """Return the place of each operator in the order of execution, by its number."""
    return {number: place for place, number in enumerate(program.recorded.order)}


def _is_inverted(first: int, second: int, ranks: Mapping[int, int]) -> bool:
    """Return whether the second operator of a pair ran before the first, or alone."""
    place = ranks.get(second)
    return place is not None and ranks.get(first, len(ranks)) > place
