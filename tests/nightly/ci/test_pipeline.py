"""Workflow of GitHub and its shell equivalent, with a `make` that prints its arguments."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conformance.project import PROJECT

PIPELINE = PROJECT / "ci" / "pipeline.sh"
WORKFLOW = PROJECT / ".github" / "workflows" / "conformance.yml"


WEEK = datetime.date.today().isocalendar().week
SUMS = ("ring", "tree")


def run(tmp_path: Path, *arguments: str, make: str = "exit 0", **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "make $*"\n{make}\n')
    (tmp_path / "make").chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        ["bash", str(PIPELINE), *arguments], env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["push"], ["make test", "make conformance PROFILE=smoke ARGS="]),
        (["check"], ["make check"]),
        (["pull-request", "2/4"], ["make conformance PROFILE=pr ARGS=--shard 2/4"]),
        (["nightly"], ["make conformance PROFILE=nightly ARGS="]),
        (["gpu"], ["make conformance PROFILE=certify ARGS="]),
        (
            ["other-kernels", "1/4"],
            [f"make conformance PROFILE=nightly ARGS=--shard 1/4 --kernels other:{WEEK} --sums {SUMS[WEEK % 2]}"],
        ),
    ],
)
def test_a_job_is_what_make_does(tmp_path: Path, arguments: list[str], asked: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout.splitlines()) == (0, asked)
    failed = run(tmp_path, *arguments, make="exit 2")
    assert (failed.returncode, failed.stdout.splitlines()) == (1, asked), "the rest runs all the same"


def test_another_torch(tmp_path: Path) -> None:
    assert run(tmp_path, "gpu", TORCH="2.15.0").stdout.startswith("make TORCH=2.15.0 conformance ")


def test_cuda_builds_are_judged_one_after_the_other(tmp_path: Path) -> None:
    """Each with another Python than the default; an environment that cannot be made fails the job, not the rest."""
    done = run(tmp_path, "cuda-build", VERSIONS="2.98.0 2.99.0", PYTHON="python3.99", make='echo "by $PYTHON"')
    asked = [
        f"make conformance TORCH={version} PROFILE=smoke ARGS=--report-dir conformance-report/torch-{version}"
        for version in ("2.98.0", "2.99.0")
    ]
    assert done.stdout.splitlines() == [asked[0], "by python3.99", asked[1], "by python3.99"]
    assert done.returncode == 1, "there is no .venv-torch-2.98.0"


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_an_unknown_job_says_which_there_are(tmp_path: Path, arguments: list[str]) -> None:
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert "pull-request   profile pr" in done.stderr


def test_the_workflow_is_valid() -> None:
    """The workflow is valid by the schema of check-jsonschema, which needs no network."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_asks_for_jobs_that_there_are() -> None:
    text = PIPELINE.read_text()
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = [command.split()[2] for command in commands if "matrix.job" not in command]
    named += [entry.split()[0] for entry in jobs["nightly"]["strategy"]["matrix"]["job"]]
    assert named
    assert all(f"\n  {name}) " in text or f"\n  {name})\n" in text for name in named), named


def test_shards_of_a_job_are_complete() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert jobs["pull-request"]["strategy"]["matrix"]["shard"] == [f"{i}/4" for i in range(1, 5)]
    nightly = [entry for entry in jobs["nightly"]["strategy"]["matrix"]["job"] if entry.startswith("nightly ")]
    assert nightly == [f"nightly {i}/4" for i in range(1, 5)]
