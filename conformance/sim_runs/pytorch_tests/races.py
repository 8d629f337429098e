"""Search for races in PyTorch's tests: each file as one program, under several schedules."""

import tempfile
from pathlib import Path

import msgspec

from conformance.sim.recorded import Place
from conformance.sim_runs.pytorch_tests.checkout import Checkout, File
from conformance.sim_runs.pytorch_tests.running import SIM, Setting, command_for, environment_for
from conformance.sim_runs.races.exploring import Report, explore
from conformance.sim_runs.races.findings import Issued, Pair
from reference_trainer.checks import UsageError

_EAGER = "eager"


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
    is_deterministic: bool = True
    """False if two eager runs have other bits, so that those of other schedules prove nothing."""
    other_bits: tuple[str, ...] = ()
    """Schedules with other bits than the eager run."""
    unfinished: tuple[str, ...] = ()
    """Schedules whose run was killed after the time limit, before its last test."""

    @property
    def bits(self) -> str:
        """Summary of the bits under all schedules."""
        if self.unfinished:
            return f"not finished under {', '.join(self.unfinished)}"
        if not self.is_deterministic:
            return "two eager runs differ"
        return f"other under {', '.join(self.other_bits)}" if self.other_bits else "equal"

    @property
    def has_race(self) -> bool:
        """True if accesses are unordered, or if a schedule alone changes bits."""
        return bool(self.unordered or (self.is_deterministic and self.other_bits and not self.unfinished))


def search_file(
    checkout: Checkout, file: File, world: int, schedules: int, *, limit_s: float, report: Report
) -> FileRaces:
    """Run a test file under several schedules and return its races.

    Bits and pairs are those of all processes that its tests start. A file whose tests are all skipped has no operator.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-tests-") as directory:
        try:
            found = explore(
                command_for(checkout, file),
                schedules,
                environment=environment_for(checkout, file, Setting(SIM, world, _EAGER)),
                limit_s=limit_s,
                working_directory=Path(directory),
                report=report,
            )
        except UsageError:  # no process has used the device
            return FileRaces(file.area, file.name, world)
    return FileRaces(
        area=file.area,
        file=file.name,
        world=world,
        operators=found.operators,
        schedules=tuple(run.schedule for run in found.runs),
        orders=found.coverage.orders,
        unordered=tuple(dict.fromkeys(_line(checkout, pair) for pair in found.pairs)),
        held_by_waits=len(found.held_by_waits),
        is_deterministic=not found.nondeterministic,
        other_bits=tuple(run.schedule for run in found.runs if run.differences),
        unfinished=tuple(run.schedule for run in found.runs if run.status < 0),
    )


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
