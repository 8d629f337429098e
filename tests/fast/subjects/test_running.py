"""Runs of a subject: jobs as ranks get them, and which of them may share processes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.pool import Task
from conformance.run.store import RecordStore
from conformance.subjects.facts import OwnErrors, ReferenceFacts, TrainJob
from conformance.subjects.running import SubjectRuns


def reference_of(norm: float) -> ReferenceFacts:
    errors = OwnErrors(by_name={}, overall=0.0)
    return ReferenceFacts(
        dtype="fp64",
        why_not_fp64="",
        parameters=["weight"],
        aliases={},
        sentinels={},
        untrained=[],
        max_norm=norm,
        losses=[norm],
        grad_norms=[norm],
        loss_error=0.0,
        norm_error=0.0,
        gradients=[errors],
        updates=[errors],
        bf16_gradients=None,
        bf16_matmul_dtypes=[],
        varies=True,
    )


class Ranks:
    """Pools that run nothing: a reference with a norm, and ranks whose tasks are kept."""

    waited_s = trained_s = 0.0
    max_world_size = 8

    def __init__(self, norm: float) -> None:
        self._results = {"unsupported": None, "train_reference": reference_of(norm)}
        self.tasks: list[Task] = []

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        name = task.function.rpartition(":")[2]
        if name in self._results:
            return [msgspec.to_builtins(self._results[name])]
        self.tasks.append(task)
        return []

    def prepare(self) -> None: ...

    def close(self) -> None: ...


def runs(ranks: Ranks, directory: Path, *, torch_version: str = "2.13.0+cpu") -> SubjectRuns:
    return SubjectRuns(RecordStore(directory, "test", torch_version, None, 60.0, ranks, subject="m:right"))


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_reaches_the_ranks(tmp_path: Path, norm: float) -> None:
    ranks = Ranks(norm)
    runs(ranks, tmp_path).evidence(TRAINER_CELLS[0])
    (task,) = ranks.tasks
    assert repr(msgspec.convert(task.payload, TrainJob).max_norm) == repr(norm)


@pytest.mark.parametrize(("torch_version", "kinds"), [("2.12.0", 2), ("2.13.0+cpu", 1)])
def test_cells_that_dtensor_confuses_do_not_share_ranks(torch_version: str, kinds: int, tmp_path: Path) -> None:
    """Up to torch 2.12 DTensor takes an embedding in bf16 for the one in fp32 that the process had before."""
    ranks = Ranks(1.0)
    for cell in TRAINER_CELLS:
        if cell.mesh == "dp2-tp2":
            runs(ranks, tmp_path, torch_version=torch_version).evidence(cell)
    assert len({task.kind for task in ranks.tasks}) == kinds
