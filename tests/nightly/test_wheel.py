"""A wheel, built from a source distribution, used from a directory that is no checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conformance.project import PROJECT
from conformance.report.facts import suite_digest

PACKAGES = ("conformance", "reference_trainer")
DATA_FILES = ("matrix.yaml", "matrix.lock", "waivers.yaml")
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", *DATA_FILES)
BUILD = "import setuptools.build_meta as build; build.build_sdist('..')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy of the checkout, whose `build` directory may hold modules that are deleted."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(PROJECT / name, source)
    run([sys.executable, "-c", BUILD], source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*pip, *map(str, directory.glob("*.tar.gz"))], directory)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """Unpack the wheel into a directory that Python searches before the environment, which has all that it needs."""
    directory = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run(command: list[str], directory: Path, **environment: str) -> str:
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=directory, env=variables, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(site: Path, directory: Path, *arguments: str) -> str:
    return run([sys.executable, "-P", *arguments], directory, PYTHONPATH=str(site))


def test_a_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        file.relative_to(PROJECT).as_posix()
        for package in PACKAGES
        for file in (PROJECT / package).rglob("*.*")
        if file.is_file() and file.parent.name != "__pycache__"
    }
    assert names == sources | {f"conformance/{name}" for name in DATA_FILES}


def test_a_wheel_has_the_matrix_and_the_waivers_of_the_checkout(site: Path) -> None:
    for name in DATA_FILES:
        assert (site / "conformance" / name).read_bytes() == (PROJECT / name).read_bytes()


def test_a_wheel_registers_the_suites_subjects(site: Path, tmp_path: Path) -> None:
    listed = python(site, tmp_path, "-m", "conformance", "judge", "--list").splitlines()[2:]
    assert {"fabric", "reference", "torchtitan"} <= {line.split()[0] for line in listed}


def test_a_wheel_is_the_same_suite_without_a_commit(site: Path, tmp_path: Path) -> None:
    """Reports of a wheel and of its checkout can be compared; the commit would be that of the directory around."""
    run(["git", "init", "--quiet"], site)
    program = "from conformance.report import facts as e; print(e.__file__, e.suite_digest(), e._git_commit())"
    file, digest, commit = python(site, tmp_path, "-c", program).split()
    assert Path(file).is_relative_to(site)
    assert (digest, commit) == (suite_digest(), "None")


def test_commands_of_a_wheel(site: Path, tmp_path: Path) -> None:
    conformance = ["-m", "conformance"]
    assert python(site, tmp_path, *conformance, "list", "--profile", "smoke", "--cases").count("\n") > 1
    assert "conformance/laws/numerics/test_par.py:" in python(site, tmp_path, *conformance, "show", "PAR-1")


@pytest.mark.parametrize("arguments", [["docs"], ["versions", "--write-docs", "."]])
def test_commands_that_need_a_checkout_say_so(site: Path, tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "conformance", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    line = rf"conformance: \S+ needs a checkout of the suite, {site}/conformance is an installed wheel\n"
    assert done.returncode != 0
    assert re.fullmatch(line, done.stderr)


def test_pytest_collects_the_laws_of_a_wheel(site: Path, tmp_path: Path) -> None:
    pytest_command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only"]
    laws = ["--pyargs", "conformance.laws", "--profile", "smoke", "--cells", "mesh = dp2"]
    output = python(site, tmp_path, *pytest_command, *laws)
    assert "test_par.py::test_" in output
    assert list(tmp_path.iterdir()) == []
