"""Examples of all kinds are conformant, with all faults seen, as `conformance judge --init` writes them."""

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.run.kinds import kinds, write_example


@pytest.mark.parametrize("kind", kinds())
def test_an_example_is_conformant(kind: str, tmp_path: Path) -> None:
    for command in write_example(kind, tmp_path / "mine.py"):
        judged = subprocess.run(
            [sys.executable, "-m", *command.split(), "--limit", "300"], cwd=tmp_path, capture_output=True, text=True
        )
        assert judged.returncode == 0, judged.stdout[-4000:]
