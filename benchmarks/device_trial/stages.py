"""Stages of a trial: programs with time limits, which may need earlier stages to have succeeded, and their values."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


def tell(name: str, value: object) -> None:
    """Print one value at once, so that a probe that is cut off has printed all values until then."""
    print(f"{name}\t{value}", flush=True)


def printed_values(output: str) -> dict[str, str]:
    """Return the values in the output of a probe by name."""
    pairs = (line.partition("\t") for line in output.splitlines())
    return {name: value for name, tab, value in pairs if tab}


def yes(answers: Iterable[bool]) -> str:
    """Return `yes`, `no`, or how many answers of all are yes."""
    given = list(answers)
    return "yes" if all(given) else "no" if not any(given) else f"{sum(given)} of {len(given)}"


_TO_REPORT_S = 25.0
"""Time that a session has between SIGTERM and its end, to write its report."""


@dataclass(frozen=True)
class Stage:
    """A program of a trial."""

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()
    """Names of earlier stages without whose success this one means nothing."""
    expected: Sequence[int] = (0,)
    """Exit statuses that the stage may have."""
    report: Path | None = None
    """Directory of the session's report, if the stage is a session of the suite."""
    fills_the_rest: bool = False
    """True if the stage takes all time that is left, and is expected to be cut off."""


@dataclass
class Outcome:
    """End of a stage."""

    name: str
    state: str
    """State: `expected`, `exit status N, expected ...`, `cut off`, or `not run: ...`."""
    seconds: float = 0.0
    values: dict[str, str] = field(default_factory=dict)
    report: str = ""

    @property
    def is_expected(self) -> bool:
        """True if the stage has ended as expected."""
        return self.state == "expected"


@dataclass
class Trial:
    """Run of stages within a time limit; logs and outcomes are in a directory as soon as they are there."""

    directory: Path
    total_s: float
    recipe: Path
    """File with further environment variables of all stages, as `communication` leaves it."""
    outcomes: list[Outcome] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Time that is left of the whole."""
        return self.total_s - (time.monotonic() - self._start_s)

    def run(self, stage: Stage) -> None:
        """Run a stage unless it lacks time or a needed stage has failed; its values and end stay in the directory."""
        outcome = self._outcome(stage)
        self.outcomes.append(outcome)
        text = json.dumps([vars(each) for each in self.outcomes], indent=1)
        (self.directory / "outcomes.json").write_text(text)

    def _outcome(self, stage: Stage) -> Outcome:
        failed = [each.name for each in self.outcomes if each.name in stage.needs and not each.is_expected]
        if failed:
            return Outcome(stage.name, f"not run: it needs {', '.join(failed)}")
        limit_s = min(stage.limit_s, self.left_s - _TO_REPORT_S)
        if limit_s < 1.0:
            return Outcome(stage.name, "not run: no time left")
        start_s, log = time.monotonic(), self.directory / f"{stage.name}.log"
        with log.open("wb") as output:
            status = _status(stage.command, output.fileno(), self._environment(), limit_s)
        return Outcome(
            stage.name,
            _state(stage, status),
            round(time.monotonic() - start_s, 1),
            printed_values(log.read_text(errors="replace")),
            str(stage.report or ""),
        )

    def _environment(self) -> Mapping[str, str]:
        recipe = json.loads(self.recipe.read_text()) if self.recipe.exists() else {}
        return {**os.environ, **recipe}


def _state(stage: Stage, status: int | None) -> str:
    """Return how a stage has ended, with its exit status, or None if it was cut off."""
    if status in stage.expected or (status is None and stage.fills_the_rest):
        return "expected"
    if status is None:
        return "cut off"
    return f"exit status {status}, expected {', '.join(map(str, stage.expected))}"


def _status(command: Sequence[str], output: int, environment: Mapping[str, str], limit_s: float) -> int | None:
    """Return the exit status of a program, or None if it was cut off: by SIGTERM, which sessions end with a report."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_TO_REPORT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None
