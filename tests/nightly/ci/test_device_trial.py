"""First runs on a device: set-up by the script, and its dry run where there is no device."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conformance.project import PROJECT

TRIAL = PROJECT / "ci" / "device_trial.sh"
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit {numpy}
[ "$2" = pip ] && exec {python} "$@"
echo "$@" >{directory}/called
echo "$PYTHONPATH" >{directory}/path
exit {status}
"""


def run(
    tmp_path: Path, *arguments: str, status: int = 0, numpy: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with a python that notes its arguments and ends with this status."""
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable, directory=tmp_path, status=status, numpy=numpy))
    python.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(python), "ACCELERATOR": "cpu", **environment}
    variables.pop("PYTHONPATH", None)
    command = ["bash", str(TRIAL), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def wheel(directory: Path, name: str) -> None:
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "here = True\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("arguments", [[], ["first"], ["third", "out"], ["out"]])
def test_a_call_and_a_directory_are_needed(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 4
    assert done.stderr.startswith("ci/device_trial.sh first OUT [WHEELS]")


def test_without_wheels_the_environment_is_used_as_it_is(tmp_path: Path) -> None:
    """Where the suite is installed; the exit status is the trial's."""
    out = tmp_path / "out"
    assert run(tmp_path, "first", str(out), str(tmp_path / "none"), status=1, TOTAL_S="9").returncode == 1
    called = (tmp_path / "called").read_text().split()
    assert called == ["-m", "benchmarks.device_trial", "first", str(out), "--accelerator", "cpu", "--total-s", "9"]
    assert (tmp_path / "path").read_text().strip() == ""


@pytest.mark.parametrize("has_numpy", [True, False])
def test_wheels_go_into_a_folder_of_their_own_and_numpy_stays(tmp_path: Path, has_numpy: bool) -> None:
    for name in ("numpy", "msgspec_substitute"):
        wheel(tmp_path / "wheels", name)
    trace = "set -x; ls"
    done = run(
        tmp_path, "second", str(tmp_path / "out"), str(tmp_path / "wheels"), numpy=0 if has_numpy else 1, TRACE=trace
    )
    assert done.returncode == 0, done.stderr
    site = Path((tmp_path / "path").read_text().strip())
    assert site.is_absolute()
    assert not site.exists(), "the folder goes with the script"


def test_a_dry_run_leaves_what_comes_back(tmp_path: Path) -> None:
    """Real probes and a real session on the CPU; stages that there is no time for are named."""
    out = tmp_path / "out"
    variables = {**os.environ, "PYTHON": sys.executable, "ACCELERATOR": "cpu", "TOTAL_S": "36"}
    command = ["bash", str(TRIAL), "first", str(out)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "  device: none is asked for: cpu" in done.stdout, done.stderr
    outcomes = {each["name"]: each["state"] for each in json.loads((out / "first-outcomes.json").read_text())}
    assert outcomes["machine"] == "expected"
    assert outcomes["streams"].startswith("not run: ")
    assert (out / "first-screen.txt").read_text() == done.stdout
    assert len(done.stdout.splitlines()) <= 60
    assert {file.name for file in out.iterdir()} >= {"first-screen.txt", "first-outcomes.json", "first-logs.tgz"}
    assert done.returncode == 1
