"""Exploration of a program: runs under several schedules, compared with the eager one, and the check of its trace."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conformance.sim_runs.races.differences import differences
from conformance.sim_runs.races.findings import Coverage, Exploration, Pair, ScheduleRun, Smallest
from conformance.sim_runs.races.program import Program
from conformance.sim_runs.races.runs import Run, run_under
from conformance.sim_runs.races.smallest import smallest_delay
from conformance.sim_runs.races.unordered import Program, pairs
from reference_trainer.checks import UsageError

LIMIT_S = 600.0
"""Default time limit of one run."""
_SEARCH_RUNS, _CANDIDATES = 40, 8
"""Runs of the search for the smallest schedule, and operators of unordered pairs that it tries by themselves."""

Report = Callable[[str], None]


def explore(
    command: Sequence[str],
    schedules: int,
    *,
    environment: Mapping[str, str] = os.environ,
    limit_s: float = LIMIT_S,
    report: Report = lambda line: None,
) -> Exploration:
    """Run a command under several schedules of the simulated device, and return everything that differs or may.

    The command is a program and its arguments, such as `python script.py`, `torchrun ...` or `pytest ...`, whose
    processes get the device from the environment. The schedules are eager, lazy, each stream starved, and random ones
    up to `schedules`; `report` is called with a line for each run. The eager run happens twice, to see whether the
    program is deterministic. Raises UsageError if no process of the eager run uses the device.
    """
    with tempfile.TemporaryDirectory(prefix="conformance-races-") as directory:
        return _Search(command, Path(directory), environment, limit_s, report).explore(schedules)


class _Outcome(NamedTuple):
    """Run, without its traces."""

    summary: ScheduleRun
    order: int
    """Hash of the order of execution of all processes."""
    inverted: frozenset[int]
    """Indices of the pairs that ran the other way round than they were issued."""


class _Search:
    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], limit_s: float, report: Report
    ) -> None:
        self._command, self._directory, self._environment = list(command), directory, dict(environment)
        self._limit_s, self._report = limit_s, report
        self._count = 0
        self._pairs: dict[object, Pair] = {}
        """Unordered pairs by operators, streams and lines."""

    def explore(self, schedules: int) -> Exploration:
        self._eager = eager = self._run("eager")
        if not eager.programs:
            raise UsageError(f"no process of {' '.join(self._command)} ended and used the device:\n{eager.ending}")
        again = differences(eager, self._run("eager"))
        held = [pair for program in eager.programs.values() for pair in self._check(program)]
        outcomes = [self._outcome(eager)]
        outcomes += [self._outcome(self._run(schedule)) for schedule in _after_eager(eager, schedules)]
        failing = [outcome for outcome in outcomes if outcome.summary.differences]
        found = self._smallest(failing[0]) if failing and not again else None
        smallest, shortest = found or (None, failing[0] if failing else outcomes[0])
        all_pairs = [*self._pairs.values()]
        return Exploration(
            command=self._command,
            processes=[*eager.programs],
            operators=sum(len(program.positions) for program in eager.programs.values()),
            runs=[outcome.summary for outcome in outcomes],
            nondeterministic=again,
            pairs=all_pairs,
            shown=[
                [outcome.summary.schedule for outcome in failing if index in outcome.inverted]
                for index in range(len(all_pairs))
            ],
            held_by_waits=held,
            queries=[*dict.fromkeys(place for program in eager.programs.values() for place in program.queries())],
            smallest=smallest,
            explained_by=sorted(shortest.inverted),
            coverage=Coverage(
                runs=len(outcomes),
                orders=len({outcome.order for outcome in outcomes}),
                pairs=len(all_pairs),
                pair_orders=len({outcome.inverted for outcome in outcomes}),
            ),
        )

    def _run(self, schedule: str) -> Run:
        self._count += 1
        run = run_under(
            schedule,
            self._command,
            self._directory / f"{self._count}",
            environment=self._environment,
            limit_s=self._limit_s,
        )
        self._report(f"{schedule}: status {run.status}, {run.duration_s:.1f} s")
        return run

    def _check(self, program: Program) -> list[Pair]:
        """Add the unordered pairs of a trace to those that are known; returns the pairs that waits hold together."""
        unordered, held = pairs(program)
        for pair in unordered:
            self._pairs.setdefault(_key(pair), pair)
        return held

    def _outcome(self, run: Run) -> _Outcome:
        """Compare a run with the eager one, and its order of execution with that of the trace.

        Only a run in which the host comes too early has its access in the trace, which is then checked.
        """
        is_eager = run is self._eager
        host_keys: set[object] = set()
        for program in () if is_eager else run.programs.values():
            if any(entry.kind == "host" for entry in program.trace):
                early = [pair for pair in pairs(program)[0] if not pair.second.number]
                host_keys |= {_key(pair) for pair in early}
                for pair in early:
                    self._pairs.setdefault(_key(pair), pair)
        ranks = {name: _ranks(program) for name, program in run.programs.items()}
        inverted = frozenset(
            index
            for index, (key, pair) in enumerate(self._pairs.items())
            if key in host_keys or _is_inverted(pair, ranks.get(pair.process, {}))
        )
        differing = [] if is_eager else differences(self._eager, run)
        ending = run.ending if run.status != self._eager.status else ""
        order = hash(tuple((name, *program.recorded.order) for name, program in run.programs.items()))
        return _Outcome(ScheduleRun(run.schedule, run.status, run.duration_s, differing, ending), order, inverted)

    def _smallest(self, failing: _Outcome) -> tuple[Smallest, _Outcome] | None:
        """Return the smallest range of delayed operators that changes bits, with its run."""
        tried: dict[tuple[int, int], _Outcome] = {}

        def differs(first: int, last: int) -> bool:
            outcome = tried[first, last] = self._outcome(self._run(f"delay:{first}-{last}"))
            return bool(outcome.summary.differences)

        all_pairs = [*self._pairs.values()]
        numbers = [all_pairs[index].first.number for index in sorted(failing.inverted)]
        programs = self._eager.programs
        last = max(max(program.positions) for program in programs.values())
        found = smallest_delay(differs, [*dict.fromkeys(numbers)][:_CANDIDATES], last, runs=_SEARCH_RUNS)
        if found is None:
            return None
        outcome = tried[found]
        in_pairs = [all_pairs[index].process for index in sorted(outcome.inverted)]
        changed = [difference.process for difference in outcome.summary.differences]
        process = next(name for name in (*in_pairs, *changed, *programs) if name in programs)
        delayed = [programs[process].operator(number) for number in dict.fromkeys(found)]
        schedule = outcome.summary.schedule
        return Smallest(schedule, failing.summary.schedule, delayed, process, len(tried)), outcome


def _after_eager(eager: Run, schedules: int) -> list[str]:
    """Return the schedules beside the eager one: lazy, each stream starved, and random ones up to a number of all."""
    streams = max(sum(entry.kind == "stream" for entry in program.trace) for program in eager.programs.values())
    systematic = ["lazy", *(f"starve:{number}" for number in range(1, streams + 1))][: max(schedules - 1, 0)]
    return [*systematic, *(f"random:{seed}" for seed in range(1, schedules - len(systematic)))]


def _key(pair: Pair) -> object:
    places = [(issued.operator, issued.stream, issued.program) for issued in (pair.first, pair.second)]
    return pair.process, *places, pair.is_reuse


def _ranks(program: Program) -> dict[int, int]:
    """Return the place of each operator in the order of execution, by its number."""
    return {number: place for place, number in enumerate(program.recorded.order)}


def _is_inverted(pair: Pair, ranks: Mapping[int, int]) -> bool:
    """Return whether the second operator of a pair ran before the first, or alone."""
    second = ranks.get(pair.second.number)
    return second is not None and ranks.get(pair.first.number, len(ranks)) > second
