"""Files that run the suite elsewhere: each is read by a tool of its ecosystem, since nothing here can run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.project import PROJECT

CI = PROJECT / "ci"
SLURM = CI / "slurm.sbatch"
SCRIPTS = sorted(map(str, [*CI.glob("*.sh"), SLURM, PROJECT / ".ci" / "run"]))


def lint(*command: str) -> None:
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_scripts() -> None:
    lint(str(Path(sys.executable).with_name("shellcheck")), *SCRIPTS)


def test_the_pre_commit_configuration() -> None:
    lint(sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1, "srun pytest --pyargs conformance.laws -n auto --report-dir /r --profile certify"),
        (
            2,
            "srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint first:29500 "
            "-m conformance spmd --report-dir /r -- --profile certify",
        ),
    ],
)
def test_the_slurm_job(tmp_path: Path, nodes: int, expected: str) -> None:
    for name, body in {"srun": 'echo "srun $*"', "scontrol": "printf 'first\\nsecond\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "REPORT_DIR": "/r",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "many",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", str(SLURM), "--profile", "certify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize("arguments", [[], [str(CI)]])
def test_a_wheel_is_tried_in_a_new_directory_only(arguments: list[str]) -> None:
    command = ["bash", str(CI / "try_wheel.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (4, True)
