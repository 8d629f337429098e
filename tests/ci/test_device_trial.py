"""First run on a device: its stages, with a python that does nothing in place of sessions."""

import os
import re
import subprocess
import sys
from pathlib import Path

from conformance.plan.matrix import load_matrix
from conformance.project import PROJECT, data_file

TRIAL = PROJECT / "ci" / "device_trial.sh"
STAGES = ["environment", "two-ranks", "four-ranks", "streams", "allocator"]
RACES = ["all-reduce-buffer-released", "offload-copy-not-awaited", "offload-source-released"]


def run(tmp_path: Path, *arguments: str, session: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the trial with sessions that end with this status at once."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = - ] && exec {sys.executable} "$@"\n'
        f'case "$*" in *--defect*) exit 1;; *pytest*) exit {session};; esac\nexit 0\n'
    )
    python.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(python), **environment}
    command = ["bash", str(TRIAL), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def stages(out: Path) -> dict[str, str]:
    return {line.split("\t")[0]: line.split("\t")[1] for line in (out / "stages.tsv").read_text().splitlines()}


def test_all_stages_are_run_in_order(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path / "out"), "no-wheels")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = stages(tmp_path / "out")
    assert list(ran) == [*STAGES, *(f"race-{name}" for name in RACES), "smoke"]
    assert set(ran.values()) == {"expected"}
    assert (tmp_path / "out" / "summary.txt").read_text() == done.stdout


def test_a_stage_that_fails_stops_no_other(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path / "out"), "no-wheels", session=3)
    assert done.returncode == 1
    ran = stages(tmp_path / "out")
    assert ran["two-ranks"] == "exit status 3, expected 0"
    assert ran["race-offload-copy-not-awaited"] == "expected"
    assert "smoke" in ran


def test_the_cpu_shows_no_race_and_has_no_allocator(tmp_path: Path) -> None:
    run(tmp_path, str(tmp_path / "out"), "no-wheels", ACCELERATOR="cpu")
    ran = stages(tmp_path / "out")
    assert "allocator" not in ran
    assert ran["race-offload-copy-not-awaited"] == "exit status 1, expected 0 5"


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path / "out"), "no-wheels", TOTAL_S="15")
    assert done.returncode == 1
    assert set(stages(tmp_path / "out").values()) == {"not run"}
    assert "no time left" in (tmp_path / "out" / "stages.tsv").read_text()


def test_without_a_directory_the_usage_is_printed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 4
    assert done.stderr.startswith("usage: ci/device_trial.sh OUT")


def test_its_cells_are_of_the_matrix() -> None:
    named = set(re.findall(r"\b(?:dp2|hsdp2x2)-[a-z0-9.-]+", TRIAL.read_text()))
    assert len(named) > 5
    assert named <= load_matrix(data_file("matrix.yaml")).cells.keys()
