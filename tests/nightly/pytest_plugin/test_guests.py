"""A project with its tests and a conftest file, which judges its trainers in the same session of pytest."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from conformance.project import PROJECT
from conformance.run.kinds import DEFAULT_KIND, example

CONFTEST = """
import pytest, torch

def pytest_addoption(parser):
    parser.addoption("--cells")
    parser.addoption("--fast", action="store_true")

@pytest.fixture(autouse=True)
def other_default(request):
    torch.set_default_dtype(torch.float64)
"""
CONFIGURATION = """
[tool.pytest.ini_options]
addopts = "-ra --strict-markers --conformance-report-dir=out"
testpaths = ["tests"]
"""
OWN = "import torch\ndef test_own(): assert torch.get_default_dtype() == torch.float64\n"
DOUBLED = """
    def double(parameter):
        parameter.grad.mul_(2)

    fully_shard(model, **options)
    model.head.weight.register_post_accumulate_grad_hook(double)
    return model
"""
PLAIN = "dp2-fp32-default-full"
PLAIN_CELL = ("-k", f"test_own or ({PLAIN}] and not acc)")
"""Selection of the project's own test, and of the laws on one cell."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the directory of a project with a right trainer in a file and a test."""
    (tmp_path / "my_train.py").write_text(example(DEFAULT_KIND))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text(CONFIGURATION)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_own.py").write_text(OWN)
    return tmp_path


def make_wrong(project: Path) -> None:
    right = "    return fully_shard(model, **options)\n"
    file = project / "my_train.py"
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, DOUBLED))


def run(project: Path, *arguments: str, program: str = "pytest", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=project,
        env={**environment, "PYTHONPATH": str(PROJECT), "CI": "true", **variables},  # pytest cuts no lines in CI
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def judged(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(project, "--conformance-subject=my_train.py", *arguments, **variables)


def junit(file: Path) -> dict[str, set[str]]:
    """Return the names of cases by class."""
    names: dict[str, set[str]] = {}
    for case in ET.parse(file).iter("testcase"):
        names.setdefault(case.attrib["classname"], set()).add(case.attrib["name"])
    return names


def test_laws_stand_beside_own_tests_in_all_workers(project: Path) -> None:
    done = judged(project, "--conformance-fast", "-n2", "--fast", "--cells=x", "--junitxml=junit.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    names = junit(project / "junit.xml")
    assert names.pop("tests.test_own") == {"test_own"}
    assert names.keys() == {"my_train.parallelize"}
    assert {f"gradients[{PLAIN}-acc2-uneven]", "bf16-is-used[dp2-bf16mp-default-full]"} <= names["my_train.parallelize"]
    assert "CONFORMANT (only --fast; 7 of 15 cells, nothing about offloading, no fault tried)" in done.stdout
    assert (project / "out" / "my_train-parallelize" / "report.html").exists()
    without = judged(project, "-n0", "-m", "not conformance")
    assert without.returncode == 0
    assert "1 passed" in without.stdout


def test_a_failure_is_a_failed_test_an_annotation_and_can_be_accepted(project: Path) -> None:
    make_wrong(project)
    done = judged(project, "-n0", *PLAIN_CELL, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(project / "summary.md"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED my_train.py::parallelize::gradients[{PLAIN}] - Failed: gradient at step 0 of head" in done.stdout
    assert re.search(r"^::error file=my_train.py,(line=\d+,)?title=[a-z-]+\[", done.stdout, re.MULTILINE), done.stdout
    assert (project / "summary.md").read_text().startswith("## NOT CONFORMANT")
    cells = ("--cells", f"id = {PLAIN}", "--no-faults", "--explain=0", "--report-dir=other")
    accepted = run(
        project, "judge", "my_train.py:parallelize", *cells, "--accept", "known", "--until=9999-01-31",
        program="conformance",
    )  # fmt: skip
    assert accepted.returncode == 1, accepted.stdout
    file = project / "conformance-accepted.yaml"
    assert "conformance-accepted.yaml: " in accepted.stderr
    option = f"--conformance-accepted={file.name}"
    done = judged(project, "-n0", *PLAIN_CELL, option)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xfailed" in done.stdout
    assert f"XFAIL my_train.py::parallelize::gradients[{PLAIN}] - accepted until 9999-01-31 (known): " in done.stdout
    verified = run(project, "verify", "out/my_train-parallelize", program="conformance")
    assert verified.returncode == 0, verified.stdout
    file.write_text(file.read_text().replace("9999-01-31", "2026-01-31"))
    done = judged(project, "-n0", *PLAIN_CELL, option)
    assert done.returncode == 1
    assert re.search(r"conformance-accepted.yaml:\d+ accepts this until 2026-01-31, which is past", done.stdout)
    (project / "my_train.py").write_text(example(DEFAULT_KIND))
    done = judged(project, "-n0", *PLAIN_CELL, option)
    assert done.returncode == 1
    assert re.search(r"unexpected-pass: .*although .*conformance-accepted.yaml:\d+ accepts its failure", done.stdout)


def test_a_trainer_that_cannot_be_judged_is_one_failure(project: Path) -> None:
    file = project / "my_train.py"
    file.write_text(file.read_text() + "\nraise KeyError('settings')\n")
    done = judged(project, "-n0", *PLAIN_CELL)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "rank 0 raised KeyError: 'settings' (my_train.py:" in done.stdout
    refused = run(project, "--conformance-subject=none.py")
    assert (refused.returncode, refused.stderr.strip()) == (4, "ERROR: --conformance-subject: no file none.py")


def test_faults_are_an_item_of_their_own(project: Path) -> None:
    done = judged(project, "-n0", "-k", f"({PLAIN}] and not acc) or faults")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"faults seen: 5 of 5 on {PLAIN}" in done.stdout


def test_a_test_of_the_project_can_judge_a_trainer(project: Path) -> None:
    options = f"options=['--no-faults', '--explain=0', '--cells=id = {PLAIN}']"
    text = "from conformance.subjects import judge\n"
    text += f"def test_conforms(): judge('my_train:parallelize', {options})\n"
    (project / "tests" / "test_conforms.py").write_text(text)
    assert run(project, "-n0", "tests/test_conforms.py").returncode == 0
    make_wrong(project)
    done = run(project, "-n0", "tests/test_conforms.py")
    assert done.returncode == 1
    assert "AssertionError: NOT CONFORMANT" in done.stdout
    assert "my_train:parallelize/dp2-fp32-default-full: " in done.stdout
