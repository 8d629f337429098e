"""Laws on the simulated device where it chooses operators as CUDA does: they judge, and still fail on defects."""

from collections.abc import Iterator

import pytest
import torch

from conformance.assertions import memory_bounds
from conformance.detection.case_judge import CaseJudge
from conformance.judge.verdicts import Verdict
from conformance.oracles.torch_versions import traits_of
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.run.devices.hardware import find_hardware
from conformance.run.pool import Pools
from tests.support.fake_devices import FakeDevices
from tests.support.simulated_processes import library

DP2 = Cell(mesh="dp2")
DROPOUT, UNEVEN = DP2.but(dropout=0.1), DP2.but(model="uneven")
TABLES = DP2.but(model="deep", precision="bf16-mp", accumulation=4)
"""Cell whose memory in forward is highest while a group is copied out: gradients of other micro-batches wait."""
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    hardware = find_hardware(FakeDevices(), accelerator="sim", share_gpu="auto")
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools, hardware=hardware)


def judged(case_judge: CaseJudge, law: str, cell: Cell, *, defect: str | None = None) -> tuple[Verdict, str]:
    (result,) = case_judge.judge([Case(law, cell)], defect=defect, deadline_s=DEADLINE_S)
    return result.verdict, result.reason


@pytest.mark.parametrize(
    ("law", "cell"),
    [
        ("PAR-1", DROPOUT),
        ("PAR-10", DROPOUT.but(activation_checkpointing="selective")),
        ("PAR-2", DROPOUT.but(precision="bf16-mp", activation_checkpointing="full")),
        ("PAR-7", DROPOUT.but(mesh="tp2", model="even", sequence_parallel=False, precision="fp16-mp")),
        ("PAR-10", DROPOUT.but(mesh="pp2", model="cut", accumulation=4)),
        ("PAR-1", UNEVEN),
        ("MP-1", UNEVEN),
        ("AC-1", UNEVEN.but(activation_checkpointing="full")),
        ("AC-1", UNEVEN.but(activation_checkpointing="selective", dropout=0.1)),
        ("ENV-5", Cell(mesh="tp2")),
        ("MEM-10", TABLES),
    ],
    ids=lambda value: value.id if isinstance(value, Cell) else value,
)
def test_a_law_judges(case_judge: CaseJudge, law: str, cell: Cell) -> None:
    verdict, reason = judged(case_judge, law, cell)
    assert verdict == (Verdict.PASS if library() else Verdict.UNSUPPORTED), reason


@pytest.mark.parametrize(
    ("defect", "law", "cell"),
    [
        ("dropout-not-rescaled", "PAR-1", DROPOUT),
        ("dropout-same-on-data-ranks", "PAR-10", DROPOUT),
        ("dropout-same-in-every-step", "PAR-10", DROPOUT),
        ("dropout-recomputed-otherwise", "PAR-10", DROPOUT.but(activation_checkpointing="full")),
        ("attention-not-selected", "AC-1", DP2.but(activation_checkpointing="selective")),
        ("ac-ignored", "AC-1", UNEVEN.but(activation_checkpointing="full")),
        ("ac-unasked", "AC-1", UNEVEN),
    ],
)
def test_a_law_fails(case_judge: CaseJudge, defect: str, law: str, cell: Cell) -> None:
    verdict, reason = judged(case_judge, law, cell, defect=defect)
    assert verdict == (Verdict.FAIL if library() else Verdict.UNSUPPORTED), reason


def test_memory_without_tables_is_not_enough(case_judge: CaseJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound has room for the table, and for nothing that is as large."""
    if not traits_of(str(torch.__version__)).previous_gather_until_copied:
        return  # less is held while a group is copied out: the peak is at another time
    monkeypatch.setattr(memory_bounds, "largest_tables_bytes", lambda *_, **__: {})
    verdict, reason = judged(case_judge, "MEM-10", TABLES)
    assert verdict == (Verdict.FAIL if library() else Verdict.UNSUPPORTED), reason
    assert library() is None or "peak of forward" in reason, reason
