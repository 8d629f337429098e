"""One run of a command on the simulated device under a schedule, with all that its processes recorded."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conformance.sim import recorded, settings
from conformance.sim_runs.races.program import Program

_ENDING_LINES = 20


@dataclass(frozen=True)
class Run:
    """Ended run of a command."""

    schedule: str
    status: int
    """Exit status of the command, negative for a signal."""
    duration_s: float
    programs: dict[str, Program]
    """Processes that came to their end and used the device, by name."""
    died: set[str]
    """Names of the processes that recorded and did not come to their end."""
    ending: str
    """Last lines of the output."""


def run_under(
    schedule: str,
    command: Sequence[str],
    directory: Path,
    *,
    environment: Mapping[str, str],
    limit_s: float,
    working_directory: Path | None = None,
) -> Run:
    """Run a command to its end, or kill it and its children after the time limit; the directory must be new."""
    directory.mkdir(parents=True)
    output = directory / "output.txt"
    chosen = {settings.SCHEDULE_VARIABLE: schedule, settings.RECORD_VARIABLE: str(directory)}
    start_s = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment, **chosen},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
            file.write(f"\nkilled after {limit_s:g} s\n")
        finally:
            _kill_group(process)
    duration_s = time.monotonic() - start_s
    ended = {file.stem: file for file in sorted(directory.glob(f"*{recorded.ENDED}"))}
    programs = {name: Program(name, recorded.read(file)) for name, file in ended.items()}
    return Run(
        schedule,
        status,
        duration_s,
        {name: program for name, program in programs.items() if program.trace},
        {file.stem for file in directory.glob(f"*{recorded.STARTED}")} - ended.keys(),
        "\n".join(output.read_text(errors="replace").splitlines()[-_ENDING_LINES:]),
    )


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the processes that the command has left behind, and the command itself if it still runs."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
