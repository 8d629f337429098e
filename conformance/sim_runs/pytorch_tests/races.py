"""Search for races in PyTorch's tests: each file as one program, under several schedules."""

import signal
import tempfile
from pathlib import Path

import msgspec

from conformance.sim.recorded import Place
from conformance.sim_runs.pytorch_tests.checkout import Checkout, File
from conformance.sim_runs.pytorch_tests.outcomes import IMPORT, Outcome
from conformance.sim_runs.pytorch_tests.running import (
    PROCESS,
    SIM,
    TIME_LIMIT,
    Ended,
    Setting,
    command_for,
    environment_for,
    outcomes_after,
)
from conformance.sim_runs.races.exploring import DeviceUnused, Report, explore
from conformance.sim_runs.races.findings import Difference, Issued, Pair

EAGER = "eager"
"""First schedule of a search."""
_STATES = {IMPORT: "failed at import", TIME_LIMIT: "killed at the time limit", PROCESS: "failed before its first test"}


class FileRaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outcome of the search in a test file."""

    area: str
    file: str
    world: int
    operators: int = 0
    """Operators that the processes of all tests ran on the device in the eager run; 0 if no process used it."""
    schedules: tuple[str, ...] = ()
    orders: int = 0
    """Distinct orders of execution that the schedules gave."""
    unordered: tuple[str, ...] = ()
    """Kinds of pairs of accesses that no event orders: operators and lines."""
    held_by_waits: int = 0
    """Number of kinds of pairs that only a wait of the host orders."""
    eager_differences: tuple[str, ...] = ()
    """First bits of each process in which two eager runs differ; those of other schedules then prove nothing."""
    other_bits: tuple[str, ...] = ()
    """Schedules with other bits than the eager run."""
    unfinished: tuple[str, ...] = ()
    """Schedules whose run was killed after the time limit, before its last test."""
    not_run: Outcome | None = None
    """Failure of the whole file in the eager run, before any operator."""

    @property
    def bits(self) -> str:
        """Summary of the bits under all schedules, or why there are none."""
        if self.not_run:
            return f"{_STATES[self.not_run.test.rpartition('::')[2]]}: {self.not_run.cause}"
        if self.unfinished:
            return f"not finished under {', '.join(self.unfinished)}"
        if not self.operators:
            return "no test used the device"
        if self.eager_differences:
            return "two eager runs differ"
        return f"other under {', '.join(self.other_bits)}" if self.other_bits else "equal"

    @property
    def has_race(self) -> bool:
        """True if accesses are unordered, or if a schedule alone changes bits."""
        return bool(self.unordered or (self.other_bits and not self.eager_differences and not self.unfinished))


def search_file(
    checkout: Checkout, file: File, world: int, schedules: int, *, limit_s: float, report: Report
) -> FileRaces:
    """Run a test file under several schedules and return its races.

    Bits and pairs are those of all processes that its tests start. A file whose tests are all skipped has no operator.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-tests-") as directory:
        junit = Path(directory) / "junit.xml"
        try:
            found = explore(
                [*command_for(checkout, file), f"--junitxml={junit}"],
                schedules,
                environment=environment_for(checkout, file, Setting(SIM, world, EAGER)),
                limit_s=limit_s,
                working_directory=Path(directory),
                report=report,
            )
        except DeviceUnused as unused:
            status = None if unused.run.status == -signal.SIGKILL else unused.run.status
            not_run = _failure(junit, file, Ended(status, unused.run.ending, limit_s))
            return FileRaces(file.area, file.name, world, not_run=not_run)
        not_run = None if found.operators else _failure(junit, file, Ended(found.runs[0].status, "", limit_s))
    return FileRaces(
        area=file.area,
        file=file.name,
        world=world,
        operators=found.operators,
        schedules=tuple(run.schedule for run in found.runs),
        orders=found.coverage.orders,
        unordered=tuple(dict.fromkeys(_line(checkout, pair) for pair in found.pairs)),
        held_by_waits=len(found.held_by_waits),
        eager_differences=tuple(dict.fromkeys(_difference(checkout, each) for each in found.nondeterministic)),
        other_bits=tuple(run.schedule for run in found.runs if run.differences),
        unfinished=tuple(run.schedule for run in found.runs if run.status < 0),
        not_run=not_run,
    )


def _failure(junit: Path, file: File, ended: Ended) -> Outcome | None:
    """Return the failure of the whole file; None if pytest ran its tests, or skipped them."""
    outcomes = outcomes_after(junit, file.name, ended)
    return next(
        (outcome for outcome in outcomes if outcome.test in {f"{file.name}::{state}" for state in _STATES}), None
    )


def _difference(checkout: Checkout, difference: Difference) -> str:
    return f"{difference.what} at {_at(checkout, difference.place)}"


def _line(checkout: Checkout, pair: Pair) -> str:
    return f"{_issued(checkout, pair.first)}; {_issued(checkout, pair.second)}"


def _issued(checkout: Checkout, issued: Issued) -> str:
    return f"{issued.operator} on {issued.stream} at {_at(checkout, issued.torch or issued.program)}"


def _at(checkout: Checkout, place: Place | None) -> str:
    if place is None:
        return "an unknown line"
    file = Path(place.file)
    tests = checkout.tests
    shown = file.relative_to(tests) if file.is_relative_to(tests) else place.file.rpartition("/site-packages/")[2]
    return f"{shown}:{place.line}"
