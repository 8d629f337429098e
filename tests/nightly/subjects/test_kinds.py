"""Examples of all kinds are conformant, with all faults seen, as `conformance judge --init` writes them."""

from pathlib import Path

import pytest

from conformance.run.kinds import kinds, write_example
from tests.support.programs import output_of


@pytest.mark.parametrize("kind", kinds())
def test_an_example_is_conformant(kind: str, tmp_path: Path) -> None:
    for command in write_example(kind, tmp_path / "mine.py"):
        output_of("-m", *command.split(), "--limit", "300", cwd=tmp_path, limit_s=3000)
