"""Subjects: jobs of ranks, processes that they share, uninitialised memory, and verdicts that are kept."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import TRAINER_CELLS
from conformance.report.text import headline
from conformance.report.trainer import FaultSeen, Ingredient, RunPolicy, TrainerFacts, trainer_lines
from conformance.run.pool import Task
from conformance.run.store import RecordStore
from conformance.subjects import decorated, keeping
from conformance.subjects.cells import reference_cell
from conformance.subjects.facts import Description, OwnErrors, ReferenceFacts, TrainJob
from conformance.subjects.measuring import uninitialised_is_nan
from conformance.subjects.packages import versions_of
from conformance.subjects.protocol import SubjectMistake
from conformance.subjects.running import SubjectRuns
from tests.support.no_pools import NoPools
from tests.support.sample_reports import case, report


def reference_of(norm: float) -> ReferenceFacts:
    errors = OwnErrors(by_name={}, overall=0.0)
    return ReferenceFacts(
        dtype="fp64",
        why_not_fp64="",
        parameters=["weight"],
        aliases={},
        sentinels={},
        sentinels_at_most={},
        unsaved_buffers=[],
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
        activations=[],
        varies=True,
    )


class Ranks(NoPools):
    """Pools whose reference has a norm, and which keep the tasks of ranks."""

    def __init__(self, norm: float) -> None:
        description = Description(versions={}, shims=[])
        self._results = {"unsupported": None, "train_reference": reference_of(norm), "describe": description}
        self.tasks: list[Task] = []

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        name = task.function.rpartition(":")[2]
        if name in self._results:
            return [msgspec.to_builtins(self._results[name])]
        self.tasks.append(task)
        return []


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


# Memory that torch hands out while a subject builds its model


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("fills", [True, False])
def test_settings_are_as_before(monkeypatch: pytest.MonkeyPatch, enabled: bool, warn_only: bool, fills: bool) -> None:
    """Also with a torch that fills no memory, which is refused."""
    if not fills:
        monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    before = settings()
    try:
        if fills:
            with uninitialised_is_nan():
                assert torch.empty(2).isnan().all()
        else:
            with pytest.raises(RuntimeError, match="does not fill uninitialised memory"), uninitialised_is_nan():
                pass
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


# Kept verdicts, and their table

TRAINER = TrainerFacts(
    name="other",
    given="package:Other",
    versions={"other": "1.0"},
    shims=["other._private"],
    policies=[],
    faults=[
        FaultSeen(fault="stale-shard", cell="dp2-fp32-default-full", laws=[]),
        FaultSeen(fault="local-norm", cell="dp2-fp32-default-full", laws=["clipping"]),
    ],
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, keeping.KeptSubject]:
    """Return the kept verdicts of a report."""
    monkeypatch.setattr(keeping, "DIRECTORY", tmp_path)
    cases = [
        case("loss/other/dp2-fp32-default-full"),
        msgspec.structs.replace(case("loss/other/hsdp2x2-fp32-default-full", "fail"), reason="rank 1 raised"),
        case("clipping/other/dp2-bf16mp-default-full", "unsupported"),
    ]
    assert keeping.keep(report(*cases, trainer=TRAINER)) == tmp_path / "other.json"
    return keeping.read_kept()


def test_verdicts_are_kept_and_shown(kept: dict[str, keeping.KeptSubject]) -> None:
    lines = [" ".join(line.split()) for line in keeping.table(kept).splitlines()]
    assert "| `loss` | **fail** on 1 of 2 |" in lines
    assert "| `clipping` | - |" in lines
    assert "- other: other 1.0; private names: `other._private`; faults seen: 1 of 2" in lines
    assert "- other fails loss on hsdp2x2-fp32-default-full: rank 1 raised" in lines


def test_a_session_without_faults_leaves_those_that_are_kept(kept: dict[str, keeping.KeptSubject]) -> None:
    untried = msgspec.structs.replace(TRAINER, faults=[])
    others = msgspec.structs.replace(untried, versions={"other": "2.0"})
    keeping.keep(report(case("loss/other/dp2-fp32-default-full"), trainer=untried))
    assert keeping.read_kept()["other"].faults == kept["other"].faults
    keeping.keep(report(case("loss/other/dp2-fp32-default-full"), trainer=others))
    assert keeping.read_kept()["other"].faults == {}


def test_the_headline_tells_the_ingredients_of_the_suite() -> None:
    policy = RunPolicy(cell="a", matmul_dtypes=[], gradient_dtypes=[], reductions=[], reference_dtype="fp64")

    def told(*by_suite: list[Ingredient] | None) -> str:
        policies = [msgspec.structs.replace(policy, by_suite=each) for each in by_suite]
        return headline(report(trainer=msgspec.structs.replace(TRAINER, policies=policies))).judged

    assert told(["loop", "sync", "scaling"], ["loop", "sync", "scaling", "clip"]) == (
        "parallelize, loss, data, optimizer; the suite's: loop, sync, scaling, clip"
    )
    assert told([]) == "parallelize, loss, data, loop, sync, scaling, clip, optimizer; all the owner's"
    assert told(None) == told() == ""


def test_a_blind_trainer_is_told() -> None:
    assert TRAINER.blind_to == ["stale-shard on dp2-fp32-default-full"]
    assert list(trainer_lines(TRAINER))[-1].endswith("these verdicts do not count")


def test_packages_are_those_of_the_function_of_a_partial() -> None:
    assert [*versions_of([partial(msgspec.json.decode, strict=False)])] == ["torch", "msgspec"]


@pytest.mark.parametrize(
    ("cell", "reference"),
    [
        ("dp2-fp32-default-meta", "dp2-bf16mp-default-full"),  # the one of dp2-bf16mp-default-full
        ("dp2-tp2-bf16mp-default-full", "dp2-bf16mp-default-full"),
        ("dp2-fp32-default-full-tied", "dp2-fp32-default-full-tied"),
        ("hsdp2x2-fp32-default-full-acc2-uneven", "dp4-fp32-default-full-acc2-uneven"),
        ("dp2-bf16mp-default-full-tied", "dp2-bf16mp-default-full-tied"),  # of no profile
    ],
)
def test_a_reference_is_in_bf16_where_a_cell_of_its_data_is(cell: str, reference: str) -> None:
    assert reference_cell(cell_from_id(cell)).id == reference


def test_gradients_that_torch_does_not_clip_together_are_told_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_unused: object) -> None:
        raise RuntimeError("All operands in aten.stack.default must have the same mesh, but got two")

    monkeypatch.setattr(decorated, "clip_grad_norm_", refuse)
    with pytest.raises(SubjectMistake, match=r"refuses gradients on several meshes \(All operands.*: declare clip="):
        decorated.clip_with_torch([], 1.0)
