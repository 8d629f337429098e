"""Runs of cases: the environment of their ranks; failures that are the suite's error, and those of the product."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.outcomes import Unsupported
from conformance.plan.cells import RECORD_STREAMS, Cell
from conformance.project import PACKAGE, PROJECT
from conformance.run.case_runs import CaseRuns, to_failure
from conformance.run.devices.hardware import Hardware
from conformance.run.experiment import SAVING, TRAINING
from conformance.run.failures import RunFailed
from conformance.run.ranks.messages import RankReport, Task
from conformance.run.store import RecordStore
from tests.support.fake_devices import some_devices


def raised_at(file: str) -> RunFailed:
    report = RankReport(rank=1, state="raised", stamp_s=1.0, exception_type="E", message="m", innermost_file=file)
    ranks = (RankReport(rank=0, state="finished"), report)
    return RunFailed(kind="raised", first_rank=1, reason="rank 1 raised E: m", ranks=ranks)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (str(PACKAGE / "instruments" / "poison.py"), "suite-error"),
        (str(PACKAGE / "defects" / "loss_faults.py"), "suite-error"),
        (str(PACKAGE.with_name("conformance_of_others") / "x.py"), "raised"),
        (str(PROJECT / "reference_trainer" / "train.py"), "raised"),
        (torch.__file__, "raised"),
        ("<string>", "raised"),
        ("", "raised"),
    ],
)
def test_to_failure_blames_the_owner_of_the_innermost_file(file: str, kind: str) -> None:
    failure = to_failure(raised_at(file))
    assert (failure.kind, failure.first_rank, failure.reason) == (kind, 1, "rank 1 raised E: m")
    assert "--- rank 0 finished" in failure.details


def test_to_failure_of_an_operator_under_the_dispatch_tap_blames_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, DispatchTap([]):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    innermost = str(caught.traceback[-1].path)
    assert to_failure(raised_at(innermost)).kind == "raised"


def test_a_second_cell_for_which_there_are_too_few_devices_is_unsupported(tmp_path: Path) -> None:
    """Laws compare a cell with others, of which the machine may be too small for one alone."""
    devices = Hardware(devices=some_devices(2), ranks_per_device=1)
    store = RecordStore(
        directory=tmp_path, session="s", torch_version="2.13.0", defect=None, deadline_s=60, hardware=devices
    )
    with pytest.raises(Unsupported, match="this machine has no nccl for 4 ranks"):
        CaseRuns(store, ("nccl",)).run(Cell(mesh="hsdp2x2"))


class RecordedEnvironments:
    """Pools that run nothing, and keep the environment of each task by its function."""

    waited_s = trained_s = 0.0
    max_world_size = 8

    def __init__(self) -> None:
        self.by_function: dict[str, Mapping[str, str]] = {}

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        self.by_function[task.function] = env or {}
        return [{"facts": {}}] * world_size

    def prepare(self) -> None: ...

    def close(self) -> None: ...


def test_the_run_that_saves_has_the_environment_of_the_run_that_resumes(tmp_path: Path) -> None:
    pools = RecordedEnvironments()
    store = RecordStore(tmp_path, "test", str(torch.__version__), defect=None, deadline_s=60.0, pools=pools)
    CaseRuns(store).run(Cell(mesh="dp2", steps=4, saved_on="same", record_streams="1"))
    variables = {function: env.get(RECORD_STREAMS) for function, env in pools.by_function.items()}
    assert variables == {SAVING: "1", TRAINING: "1"}
