"""Benchmarks fit the modules that they measure: each can be imported, and describes its options.

Each is a process of its own: torch's test classes, which some import, freeze settings of torch in their process.
"""

import os
from pathlib import Path

import pytest

from conformance.project import PROJECT
from tests.support import forked

NAMES = sorted(file.stem for file in (PROJECT / "benchmarks").glob("*.py"))
LIMIT_S = 60.0


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_describes_its_options(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = forked.start(f"benchmarks.{name}", ["--help"], cwd=PROJECT, environment=os.environ, out=out, err=out)
    process.join(LIMIT_S)
    assert process.exitcode == 0, out.read_text()
    assert "usage: " in out.read_text()
