"""Table of clients: lines that a function of a module needs, and durations that were not measured."""

from pathlib import Path

from conformance.cli.clients_table import FIRST_TRIALS, needed_lines, table

_MODULE = '''"""Module."""

import math
import sys

WIDTH = 4


def helper():
    """Return a number.

    It is a long text.
    """
    # a comment
    return math.sqrt(WIDTH)


def unused():
    return sys.argv


@sys.intern
def wanted(
    number,
):

    return number + helper()


setup()
'''


def test_lines_are_those_that_a_function_needs(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(_MODULE)
    assert needed_lines(file, "helper") == (5, 1)  # `import math`, WIDTH, two of helper and `setup()`
    assert needed_lines(file, "wanted") == (11, 2)


def test_the_table_has_a_row_for_each_client_that_was_judged() -> None:
    failing, judging_s = {"timm": [], "verl": ["loss"]}, {"timm": 30.0, "verl": 60.0}
    rows = table(failing=failing, judging_s=judging_s, installing_s={"timm": 90.0}).splitlines()
    (timm,), (verl,) = ([row for row in rows if row.startswith(f"| {name} ")] for name in ("timm", "verl"))
    assert "1.5 min" in timm
    assert "0.5 min" in timm
    assert "conformant" in timm
    assert "not measured" in verl
    assert "`loss`" in verl
    assert all(not row.startswith(f"| {name} ") for row in rows for name in FIRST_TRIALS.keys() - {"timm", "verl"})
