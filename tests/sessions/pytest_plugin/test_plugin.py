"""Activation of the plugin: in sessions of the laws, and in no others, whose options may clash with the suite's."""

import os
import re
import types
from pathlib import Path
from typing import Any

import pytest

from conformance.project import LAWS_DIRECTORY, PACKAGE, PROJECT
from conformance.pytest_plugin import plugin
from tests.support.fake_devices import FakeDevices, some_devices
from tests.support.sessions import Printed, finish_together

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


@pytest.mark.parametrize(("cpus", "workers"), [(1, 1), (3, 1), (4, 2), (8, 4), (512, 8)])
def test_automatic_number_of_workers(monkeypatch: pytest.MonkeyPatch, cpus: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert plugin.pytest_xdist_auto_num_workers(fake_config(PROJECT, "conformance")) == workers


@pytest.mark.parametrize(("devices", "workers"), [(0, 8), (1, 1), (4, 2), (16, 8)])
def test_workers_do_not_outnumber_the_worlds_that_devices_serve(
    monkeypatch: pytest.MonkeyPatch, devices: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr("conformance.run.devices.nvml.machine_devices", lambda: FakeDevices(some_devices(devices)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = fake_config(PROJECT, "conformance")
    assert plugin.pytest_xdist_auto_num_workers(config) == workers
    config.option.accelerator = "cpu"
    assert plugin.pytest_xdist_auto_num_workers(config) == 8


# Options

IN_LAWS = ("--pyargs", "conformance.laws")
SMOKE = ("--profile", "smoke", *IN_LAWS, "--cells", "id = dp2-fp32-default-meta", "-q", "--collect-only")
SESSIONS = {
    "help of others": ("--help",),
    "options of others": ("--cells", "mesh = dp2"),
    "laws of a checkout": ("-n", "auto", "conformance/", "--profile", "smoke"),
    "help": ("--help", *IN_LAWS),
    "options, laws": (*SMOKE, "-n0"),
    "laws, options": (*SMOKE[2:], *SMOKE[:2], "-n2"),
    "same option": ("-p", "profiling", "-n0", "--profile", "test_own.py"),
    "same option in workers": ("-p", "profiling", "-n2", "--profile", "test_own.py"),
    "clash of names": ("-p", "profiling", *IN_LAWS, "--profile", "smoke"),
    "clash of destinations": ("-p", "destination", *IN_LAWS, "--cells", "smoke"),
    "clash with conftest": IN_LAWS,
}
"""Arguments of pytest in a directory with a test and plugins."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Printed]:
    """Return how the sessions of `SESSIONS` end."""
    plain, with_conftest = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("with_conftest")
    for name, text in {"test_own": OWN_TEST, "profiling": PROFILING, "destination": DESTINATION}.items():
        (plain / f"{name}.py").write_text(text)
    (with_conftest / "conftest.py").write_text(PROFILING)
    sessions = [
        (with_conftest if "conftest" in name else plain, ["-p", "no:cacheprovider", *arguments])
        for name, arguments in SESSIONS.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(plain)
        return dict(zip(SESSIONS, finish_together(sessions, tmp_path_factory.mktemp("sessions")), strict=True))


def test_sessions_of_the_laws_alone_have_the_options_of_the_suite(ended: dict[str, Printed]) -> None:
    assert "--share-gpu" not in ended["help of others"].out
    assert ended["options of others"].status == 4
    assert "--share-gpu" in ended["help"].out


def test_laws_that_are_not_in_the_directory_are_one_line(ended: dict[str, Printed]) -> None:
    status, out, err = ended["laws of a checkout"]
    assert (status, out) == (4, "")
    assert re.fullmatch(r"ERROR: no conformance/ in \S+: run pytest in a checkout of the suite, or .*", err.strip()), (
        err
    )


def test_options_stand_before_and_after_the_laws(ended: dict[str, Printed]) -> None:
    """The values of options look like arguments until the options are known."""
    assert [ended[name].status for name in ("options, laws", "laws, options")] == [0, 0], ended
    assert "test_par.py" in ended["options, laws"].out


def test_sessions_of_others_run_with_a_plugin_that_has_the_same_option(ended: dict[str, Printed]) -> None:
    """Nothing of the suite is in their output."""
    for name in ("same option", "same option in workers"):
        assert ended[name].status == 0, ended[name]
        assert "1 passed" in ended[name].out
        assert "exit status" not in ended[name].out


def test_a_clash_ends_a_session_of_the_laws_with_one_line(ended: dict[str, Printed]) -> None:
    for name, option in {
        "clash of names": "--profile",
        "clash of destinations": "--cells",
        "clash with conftest": "--profile",
    }.items():
        assert ended[name].status == 4
        assert re.fullmatch(f"ERROR: {option} is an option of another plugin here too: .*", ended[name].err.strip())
