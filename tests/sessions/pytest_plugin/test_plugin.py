"""Activation of the plugin: in sessions of the laws, and in no others, whose options may clash with the suite's."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from conformance.project import LAWS_DIRECTORY, PACKAGE, PROJECT
from conformance.pytest_plugin import plugin
from tests.support.fake_devices import FakeDevices, some_devices

OWN_TEST = "def test_own(): pass\n"
PROFILING = "def pytest_addoption(parser): parser.getgroup('fake').addoption('--profile', action='store_true')\n"
DESTINATION = "def pytest_addoption(parser): parser.addoption('--cells-x', dest='cells')\n"


def fake_config(directory: Path, *arguments: str, pyargs: bool = False) -> Any:
    return types.SimpleNamespace(
        args=list(arguments),
        invocation_params=types.SimpleNamespace(dir=directory),
        option=types.SimpleNamespace(pyargs=pyargs),
    )


@pytest.mark.parametrize(
    ("arguments", "active"),
    [
        (["conformance/"], True),
        (["."], True),
        (["./conformance/laws/numerics/test_par.py"], True),
        (["conformance/laws/numerics/test_par.py::test_replicas_are_equal[dp2-fp32]"], True),
        (["tests", "conformance/laws"], True),
        ([str(PROJECT / "conformance")], True),
        (["tests/fast/plan/test_cells.py"], False),
        (["tests"], False),
        (["conformance/run"], False),
        (["../elsewhere/conformance"], False),
        ([".."], False),
        (["conformance.laws"], False),
        ([], False),
    ],
)
def test_the_plugin_is_active_only_where_laws_are_collected(arguments: list[str], active: bool) -> None:
    config = fake_config(PROJECT, *arguments)
    assert plugin._collects_laws(config) is active
    assert (plugin.pytest_xdist_auto_num_workers(config) is not None) is active


@pytest.mark.parametrize(
    ("argument", "active"),
    [
        ("conformance", True),
        ("conformance.laws", True),
        ("conformance.laws.numerics.test_par", True),
        ("conformance.laws.numerics.test_par::test_replicas_are_equal", True),
        ("conformance.run", False),
        ("conformance.lawsuits", False),
        ("tests", False),
        ("conformance/laws", False),
    ],
)
def test_modules_are_arguments_with_pyargs(tmp_path: Path, argument: str, active: bool) -> None:
    assert plugin._collects_laws(fake_config(tmp_path, argument, pyargs=True)) is active


@pytest.mark.parametrize(("directory", "active"), [(PROJECT, False), (PACKAGE, True), (LAWS_DIRECTORY, True)])
def test_an_environment_may_lie_in_another_project(
    monkeypatch: pytest.MonkeyPatch, directory: Path, active: bool
) -> None:
    """A project with an environment in it, with a wheel of the suite, is collected without the laws."""
    monkeypatch.setattr(plugin, "_ROOT", PACKAGE)
    assert plugin._collects_laws(fake_config(directory, ".")) is active


@pytest.mark.parametrize(("cpus", "workers"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (512, 8)])
def test_automatic_number_of_workers(monkeypatch: pytest.MonkeyPatch, cpus: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert plugin.pytest_xdist_auto_num_workers(fake_config(PROJECT, "conformance")) == workers


@pytest.mark.parametrize(("devices", "workers"), [(0, 4), (1, 1), (2, 1), (4, 2), (8, 4), (16, 4)])
def test_workers_do_not_outnumber_the_worlds_that_devices_serve(
    monkeypatch: pytest.MonkeyPatch, devices: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr("conformance.run.devices.nvml.machine_devices", lambda: FakeDevices(some_devices(devices)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = fake_config(PROJECT, "conformance")
    assert plugin.pytest_xdist_auto_num_workers(config) == workers
    config.option.accelerator = "cpu"
    assert plugin.pytest_xdist_auto_num_workers(config) == 4


# Options


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a directory with a test `test_own.py` and plugins, with no others than the suite's and xdist's."""
    (directory / "test_own.py").write_text(OWN_TEST)
    (directory / "profiling.py").write_text(PROFILING)
    (directory / "destination.py").write_text(DESTINATION)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{directory}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin,conformance.pytest_plugin.plugin",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_other_sessions_have_no_options_of_the_suite(tmp_path: Path) -> None:
    assert "--share-gpu" not in run_pytest(tmp_path, "--help").stdout
    assert run_pytest(tmp_path, "--cells", "mesh = dp2").returncode == 4


def test_sessions_of_the_laws_have_the_options(tmp_path: Path) -> None:
    assert "--share-gpu" in run_pytest(tmp_path, "--help", "--pyargs", "conformance.laws").stdout


@pytest.mark.parametrize(("workers", "order"), [(0, -1), (2, 1)])
def test_options_stand_before_and_after_the_laws(tmp_path: Path, workers: int, order: int) -> None:
    """The values of options look like arguments until the options are known."""
    arguments = [["--profile", "smoke"], ["--pyargs", "conformance.laws"], ["--cells", "id = dp2-fp32-default-meta"]]
    given = [word for group in arguments[::order] for word in group]
    done = run_pytest(tmp_path, *given, f"-n{workers}", "-q", "--collect-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_par.py" in done.stdout or workers


@pytest.mark.parametrize("workers", [0, 2])
def test_sessions_of_others_run_with_a_plugin_that_has_the_same_option(tmp_path: Path, workers: int) -> None:
    done = run_pytest(tmp_path, "-p", "profiling", f"-n{workers}", "--profile", "test_own.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "option"), [("profiling", "--profile"), ("destination", "--cells")], ids=["name", "destination"]
)
def test_a_clash_ends_a_session_of_the_laws_with_one_line(tmp_path: Path, name: str, option: str) -> None:
    done = run_pytest(tmp_path, "-p", name, "--pyargs", "conformance.laws", option, "smoke")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (4, 1)
    assert done.stderr.startswith(f"ERROR: {option} is an option of another plugin here too: leave that plugin out")
