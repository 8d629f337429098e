"""Runs of test files, each in a process with a time limit."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance.project import PROJECT
from conformance.sim import settings
from conformance.sim_runs.pytorch_tests.checkout import Checkout, File
from conformance.sim_runs.pytorch_tests.outcomes import Outcome, read_junit

SIM = "sim"
"""Type of the simulated device."""
CPU = "cpu"
"""Device of runs without the simulated one, for comparison."""
TESTS_VARIABLE = "CONFORMANCE_PYTORCH_TESTS"
"""Environment variable with the folder of tests that are translated."""
TIME_LIMIT, PROCESS = "time limit", "process"
"""Names of failures of a whole file, beside `outcomes.IMPORT`."""
_GRACE_S = 30.0
"""Time in which an interrupted pytest writes its results."""
_TEST_LIMIT_S = 300
"""Time limit of torch's harness for the ranks of one test."""


class Setting(NamedTuple):
    """Device on which files run."""

    device: str
    """`sim` or `cpu`."""
    world: int
    """Number of devices, and so of ranks of most tests."""
    schedule: str = ""
    """Schedule of the simulated device; empty for the CPU."""


class Ended(NamedTuple):
    """End of the process of a test file."""

    status: int | None
    """Exit status; None if it exceeded the time limit."""
    output: str
    limit_s: float


class FileRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outcomes of the tests in a file."""

    area: str
    file: str
    world: int
    device: str
    schedule: str
    outcomes: tuple[Outcome, ...]


def run_file(checkout: Checkout, file: File, setting: Setting, *, limit_s: float) -> FileRun:
    """Run a test file; one that exceeds the limit is interrupted, and has a failed test that says so."""
    with tempfile.TemporaryDirectory(prefix="pytorch-tests-") as directory:
        outcomes = tuple(_outcomes(checkout, file, setting, Path(directory), limit_s))
    return FileRun(file.area, file.name, setting.world, setting.device, setting.schedule, outcomes)


def _outcomes(checkout: Checkout, file: File, setting: Setting, directory: Path, limit_s: float) -> Iterator[Outcome]:
    junit, log = directory / "junit.xml", directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command_for(checkout, file), f"--junitxml={junit}"],
            cwd=directory,  # tests write files here, and `torch` is not that of the checkout
            env=environment_for(checkout, file, setting),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        in_time = _finish(process, limit_s)
    status = process.returncode if in_time else None
    yield from outcomes_after(junit, file.name, Ended(status, log.read_text(errors="replace"), limit_s))


def outcomes_after(junit: Path, file: str, ended: Ended) -> Iterator[Outcome]:
    """Return the outcomes in the JUnit XML of a test file, if there is any, and a failure for an end that is none."""
    if junit.exists():
        yield from read_junit(junit, file)
    if ended.status is None:
        yield Outcome(f"{file}::{TIME_LIMIT}", "failed", f"not finished within {ended.limit_s:g} s")
    elif not junit.exists():
        yield Outcome(f"{file}::{PROCESS}", "failed", f"exit status {ended.status}: {_last_line(ended.output)}")


def command_for(checkout: Checkout, file: File) -> list[str]:
    """Return the command that runs a test file under pytest."""
    return [
        sys.executable,
        "-m",
        f"{__package__}.process",
        str(checkout.tests / file.name),
        f"--rootdir={checkout.tests}",
    ]


def environment_for(checkout: Checkout, file: File, setting: Setting) -> dict[str, str]:
    """Return the environment in which the command of a file runs on a device."""
    directory = (checkout.tests / file.name).parent
    python_path = [str(PROJECT), str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(python_path),  # tests import their neighbours
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONHASHSEED": "0",  # sets have the same order in each run
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_TEST_LIMIT_S),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun does for several ranks
    }
    environment.pop(settings.SCHEDULE_VARIABLE, None)
    if setting.device == SIM:
        environment[settings.SCHEDULE_VARIABLE] = setting.schedule
        environment[settings.DEVICES_VARIABLE] = str(setting.world)
        environment[TESTS_VARIABLE] = str(checkout.tests)
    return environment


def _finish(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a process and end its session, so that none of its ranks is left; returns whether it was in time."""
    in_time = True
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        in_time = False
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return in_time


def _last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.split("\n")) if line.strip()), "no output")
