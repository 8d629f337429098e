"""Runs of trainers that cannot be judged: one line that says what to write instead."""

from pathlib import Path

import pytest

from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns

MODELS, UNUSUAL = "tests.support.subject_models", "tests.support.unusual_subjects"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.support.nowhere:right", "no module `tests.support.nowhere` for tests.support.nowhere:right"),
        ("nowhere.py:right", "no file nowhere.py"),
        (f"{MODELS}:wrong", f"{MODELS} has no `wrong`; subjects there: right, "),
        (f"{MODELS}:not_decorated", "decorate parallelize(model, mesh, config) with"),
        (f"{MODELS}:no_module", "model= returned a int: give a function that returns an nn.Module"),
        (f"{MODELS}:dropout", "switch dropout off"),
        (f"{UNUSUAL}:auxiliary_in_backward", "let model() and loss() add that loss instead, times count(batch)"),
        (f"{MODELS}:vector_loss", "loss() returned a Tensor of shape (6, 8): return a scalar tensor"),
        (f"{MODELS}:wrong_batch", "batch() returned a tuple with tensors of shapes [(2,), (3,)]"),
    ],
)
def test_mistakes_are_one_line(pools: Pools, tmp_path: Path, name: str, problem: str) -> None:
    runs = SubjectRuns(RecordStore(tmp_path, "test", "2.13.0", None, 60.0, pools, subject=name))
    with pytest.raises(CellFailed) as raised:
        runs.reference(Cell(init="full"))
    reason = raised.value.failure.reason
    assert problem in reason
    assert "\n" not in reason
