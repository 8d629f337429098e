"""Tests of this folder start no Python process: such a test belongs to `tests/ranks` or `tests/sessions`."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_started: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.fork" or (event == "subprocess.Popen" and sys.executable in map(os.fsdecode, arguments[1])):
        _started.append(f"{event} {arguments[1:2]}")


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    """Fail a test that has started a process which runs Python."""
    _started.clear()
    yield
    assert not _started, "move the test to tests/ranks or tests/sessions"
