"""Values that no option can use: each option of sessions and commands, with numbers, texts and files of each kind."""

import argparse
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from conformance.__main__ import _parser, main
from conformance.plan.matrix import Matrix, load_matrix
from conformance.pytest_plugin import setup
from conformance.pytest_plugin.options import SESSION_OPTIONS
from conformance.pytest_plugin.setup import read_options

NUMBERS = ("nan", "inf", "-1", "1e999", "9" * 30)
FILES = ("directory", "pipe", "dangling", "empty", "binary", "/dev/zero")
VALUES = (*NUMBERS, *FILES, "", "ünïcødé")
LIMIT_S = 5
MAX_LINE = 700

ACCEPTED: dict[str, tuple[str, ...]] = {
    "--report-dir": VALUES[:-2] + VALUES[-1:],  # opened after the options are read
    "--record-dir": VALUES[:-2] + VALUES[-1:],
    "--shrink": ("9" * 30,),  # a long time
    "--explain": ("9" * 30,),
    "--deadline": ("9" * 30,),
}
"""Values that an option takes."""
VALUED = [name for name, attributes in SESSION_OPTIONS.items() if not attributes.get("action")]
"""Options of sessions with a value."""
ARGUMENTS = {
    "predict": ["--model", "llama3-8b", "--mesh", "dp8"],
    "explain": ["PAR-1/dp2-fp32-default-meta"],
    "verify": ["directory"],
    "diff": ["directory", "directory"],
    "html": ["directory"],
    "versions": ["directory"],
    "waive": ["--from", "directory"],
    "show": ["PAR-1"],
}
"""Arguments of commands that do nothing else than read."""
TAKEN = {
    ("coverage", "--missing"): ("9" * 30,),  # of more combinations than there are
    ("predict", "--picture"): (*NUMBERS, "dangling", "empty", "binary", "ünïcødé"),
    ("explain", "--limit"): ("9" * 30,),
}
"""Values that an option of a command takes."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a directory with a file of each kind."""
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    os.mkfifo("pipe")
    Path("dangling").symlink_to("nowhere")
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(256)))


@pytest.fixture(autouse=True)
def _waits_for_nothing() -> Iterator[None]:
    """Fail where a pipe is waited for."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"still reading after {LIMIT_S} s")

    earlier = signal.signal(signal.SIGALRM, end)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, earlier)


@cache
def matrix_of(path: Path) -> Matrix:
    return load_matrix(path)


def session(**given: str) -> Any:
    """Return a configuration of pytest with options of the suite."""
    defaults = {
        name.removeprefix("--").replace("-", "_"): attributes.get("default", False if "action" in attributes else None)
        for name, attributes in SESSION_OPTIONS.items()
    }
    pytest_options = {"keyword": "", "markexpr": "", "deselect": None, "ignore": None, "ignore_glob": None, "lf": False}
    return SimpleNamespace(
        option=SimpleNamespace(**{**defaults, **pytest_options, **given}),
        invocation_params=SimpleNamespace(dir=Path.cwd()),
        stash=pytest.Stash(),
        args=["conformance/"],
    )


def require_line(message: str) -> None:
    """Fail unless a message is one line; the expression of `--cells` is shown below, with a mark."""
    line, *below = message.splitlines()
    assert line
    assert len(line) <= MAX_LINE
    assert len(below) in (0, 2), message


@pytest.mark.parametrize("option", VALUED)
def test_a_session_refuses_each_value_in_one_line(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_matrix", lambda path: matrix_of(path.resolve()))
    for value in VALUES:
        signal.alarm(LIMIT_S)
        config = session(**{option.removeprefix("--").replace("-", "_"): value})
        if value in ACCEPTED.get(option, ()):
            read_options(config)
            continue
        with pytest.raises(pytest.UsageError) as refused:
            read_options(config)
        require_line(str(refused.value))


def options_of(command: str) -> list[str]:
    """Return the options of a command that take a value."""
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return [action.option_strings[-1] for action in actions if action.option_strings and action.nargs != 0]


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, option) for command in ("list", "coverage", *ARGUMENTS) for option in options_of(command)],
)
def test_a_command_refuses_each_value_in_one_line(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in VALUES:
        if value in TAKEN.get((command, option), ()):
            continue
        signal.alarm(LIMIT_S)
        status = main([command, *ARGUMENTS.get(command, []), option, value])
        printed = capsys.readouterr()
        assert status == 4, f"{value}: {printed.out}"
        require_line(printed.err.strip())
