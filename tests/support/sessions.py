"""Sessions of the suite in separate processes, for tests of their reports and exit statuses."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from conformance.project import PROJECT
from conformance.report.schema import Report
from tests.support import forked, warm_servers

LIMIT_S = 100.0
PYTEST = [sys.executable, "-m", "pytest"]
NOBODY: frozenset[psutil.Process] = frozenset()
CELL = "dp2-fp32-default-meta-sgd"
TWO_CASES = ("--cells", f"id = {CELL}", "--laws", "PAR-1,PAR-5")
"""Selection of two laws on one cell; the defect `grads-summed` violates the first."""
SIX_CASES = ("--cells", f"id in ({CELL}, dp2-fp32-default-meta-tied, dp2-fp32-default-meta-norminf)", *TWO_CASES[2:])
"""Selection of two laws on three cells."""


@dataclass(frozen=True)
class Ended:
    """Outcome of a session that has ended."""

    status: int
    output: str
    directory: Path
    descendants: frozenset[psutil.Process]
    """Processes that were seen below the session while it was watched."""

    @property
    def report(self) -> Report:
        """Report of the session."""
        return msgspec.json.decode((self.directory / "report.json").read_bytes(), type=Report)

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdicts by id of the case."""
        return {case.id: case.verdict for case in self.report.cases}


def suite(
    directory: Path,
    *arguments: str,
    workers: int = 0,
    profile: str = "pr",
    cache: Path | None = None,
    shrink_s: float = 0.0,
    explain_s: float = 0.0,
) -> list[str]:
    """Return the command of a session, which without a directory `cache` for pytest's cache knows no durations."""
    options = [f"-n{workers}", f"--profile={profile}", f"--report-dir={directory}", f"--shrink={shrink_s}"]
    options += [f"--explain={explain_s}"]
    options += ["-p", "no:hypothesispytest"]  # it loads for a second, for nothing
    options += ["-o", f"cache_dir={cache}"] if cache else ["-p", "no:cacheprovider"]
    return [*PYTEST, *options, *arguments]


def finish(
    command: list[str],
    directory: Path,
    *,
    act: Callable[[psutil.Process], bool] | None = None,
    limit_s: float = LIMIT_S,
) -> Ended:
    """Run a session to its end; `act` is called with its process again and again, until it returns True.

    Sessions are forked with torch loaded. With `act` they start their rank servers themselves, as descendants.
    """
    output = directory.with_suffix(".out")
    process = start(command, output, {} if act else {forked.RANK_SERVERS_VARIABLE: warm_servers.address()})
    try:
        seen = watch(psutil.Process(process.pid), act, limit_s=limit_s) if act else NOBODY
        process.join(limit_s)
        assert process.exitcode is not None, output.read_text()
        return Ended(process.exitcode, output.read_text(), directory, seen)
    finally:
        process.kill()


def start(command: list[str], output: Path, variables: Mapping[str, str]) -> BaseProcess:
    """Fork a session with its output in a file or on a terminal, and with more variables in its environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "120", **variables}
    assert command[: len(PYTEST)] == PYTEST
    arguments = ["-p", "tests.support.forked_ranks", *command[len(PYTEST) :]]
    return forked.start("pytest", arguments, cwd=PROJECT, environment=environment, out=output, err=output)


class Printed(NamedTuple):
    """Exit status and output of a session."""

    status: int
    out: str
    err: str


def finish_together(sessions: Sequence[tuple[Path, Sequence[str]]], directory: Path) -> list[Printed]:
    """Run sessions that judge nothing, one after the other in one process, each in a directory with arguments."""
    results, output = directory / "results.json", directory / "output"
    process = forked.context().Process(target=_finish_together, args=(sessions, results, output))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    assert results.exists(), output.read_text()
    return [Printed(*ended) for ended in json.loads(results.read_text())]


def _finish_together(sessions: Sequence[tuple[Path, Sequence[str]]], results: Path, output: Path) -> None:
    with output.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    ended = []
    for directory, arguments in sessions:
        os.chdir(directory)
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = pytest.main(["-p", "no:hypothesispytest", *arguments])
        ended.append(Printed(int(status), out.getvalue(), err.getvalue()))
    results.write_text(json.dumps(ended))


def watch(
    process: psutil.Process, act: Callable[[psutil.Process], bool], *, limit_s: float
) -> frozenset[psutil.Process]:
    """Call `act` until it returns True; returns every process seen below the session until then."""
    until_s = time.monotonic() + limit_s
    seen: set[psutil.Process] = set()
    done = False
    while not done:
        assert time.monotonic() < until_s, "the session never came to the point to act on"
        assert process.is_running()
        has_ended = process.status() == psutil.STATUS_ZOMBIE
        done = act(process)
        assert done or not has_ended, "the session ended before the point to act on"
        seen.update(process.children(recursive=True))
        time.sleep(0.05)  # looking takes milliseconds of a processor
    return frozenset(seen)


def alive(processes: frozenset[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after a grace period."""
    return psutil.wait_procs(processes, timeout=5)[1]
