"""Verdicts of the laws of pipelines on faults that no cell of the matrix can show."""

from pathlib import Path

from conformance.detection.case_judge import CaseJudge
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.run.pool import Pools


def test_gradients_that_zero_bubble_loses_are_missed(tmp_path: Path, pools: Pools) -> None:
    """PAR-1 sees torch's fault (findings/zero_bubble_loses_gradients.py), which the trainer refuses to run into."""
    cell = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline="interleaved-zero-bubble")
    (judged,) = CaseJudge(tmp_path, pools).judge([Case("PAR-1", cell)], defect="pipeline-gathered-each-micro-batch")
    assert judged.verdict == Verdict.FAIL
    assert "missing" in judged.reason
