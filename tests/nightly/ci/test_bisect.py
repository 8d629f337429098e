"""Scripts ci/bisect.sh and ci/judge.sh, with substitutes for make and Python that record their arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from conformance.project import PROJECT

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


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def bisect(project: Path, statuses: dict[str, int], good: str, bad: str) -> subprocess.CompletedProcess[str]:
    (project / "statuses").write_text("".join(f"{version} {status}\n" for version, status in statuses.items()))
    environment = {**os.environ, "PATH": f"{project}/bin:{os.environ['PATH']}", "VERSIONS": VERSIONS}
    command = [str(project / "ci" / "bisect.sh"), good, bad, "--profile", "smoke"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


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
    environment = {**os.environ, "PYTHON": str(project / "python")}
    assert subprocess.run([str(project / "ci" / "judge.sh")], env=environment, check=False).returncode == judged
