"""Commands that repeat a case, by where pytest and the laws are."""

import shlex
from pathlib import Path

import pytest

from conformance.project import LAWS_DIRECTORY, PROJECT
from conformance.pytest_plugin.repeating import repeat_command

NAME = "test_replicas_are_equal[dp2-fp32]"


PARITY = LAWS_DIRECTORY / "numerics" / "test_par.py"


@pytest.mark.parametrize(
    ("path", "directory", "test"),
    [
        (PARITY, PROJECT, [f"conformance/laws/numerics/test_par.py::{NAME}"]),
        (PARITY, LAWS_DIRECTORY, [f"numerics/test_par.py::{NAME}"]),
        (
            PARITY,
            Path("/elsewhere"),
            ["--pyargs", f"conformance.laws.numerics.test_par::{NAME}"],
        ),
        (Path("/own/test_more.py"), Path("/elsewhere"), [f"/own/test_more.py::{NAME}"]),
    ],
    ids=["checkout", "below", "wheel", "other laws"],
)
def test_the_test_is_where_pytest_is_asked_for_it(path: Path, directory: Path, test: list[str]) -> None:
    words = shlex.split(repeat_command(path, NAME, ["--profile=pr"], directory=directory))
    assert words[words.index("-n0") :] == ["-n0", "--profile=pr", "--report-dir=conformance-report-repro", *test]
