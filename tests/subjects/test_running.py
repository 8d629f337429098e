"""Runs of a subject: which of them may share processes."""

from pathlib import Path

import pytest

from conformance.run.pool import Pools
from conformance.subjects.cells import CELLS
from conformance.subjects.running import SubjectRuns


@pytest.mark.parametrize(("torch_version", "kinds"), [("2.12.0", 2), ("2.13.0+cpu", 1)])
def test_cells_that_dtensor_confuses_do_not_share_ranks(torch_version: str, kinds: int, tmp_path: Path) -> None:
    """Up to torch 2.12 DTensor takes an embedding in bf16 for the one in fp32 that the process had before."""
    runs = SubjectRuns("m:right", Pools(), tmp_path, torch_version=torch_version)
    assert len({runs._kind(cell) for cell in CELLS if cell.mesh == "dp2-tp2"}) == kinds
