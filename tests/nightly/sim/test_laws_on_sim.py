"""Laws on the simulated device: they judge, and fail on defects and on races that only streams show."""

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


OFFLOADED = DP2.but(offload="cpu", pin_memory=True)
REPLICAS = Cell(mesh="hsdp2x1")
"""Two replicas that shard over one rank each: the fewest ranks that reduce over replicas."""
RACES = {
    "all-reduce-buffer-released": (REPLICAS.but(precision="bf16-reduce"), "lazy"),
    "offload-source-released": (REPLICAS.but(offload="cpu", pin_memory=True), "starve:4"),
    "offload-copy-not-awaited": (OFFLOADED, "lazy"),
}
"""Cell that shows a race, and a schedule under which its run differs from that of an eager device."""
HIDDEN_BY_WAITS = ("copy-in-before-optimizer", "gathered-released-in-forward")
"""Races on dp2 that the host's waits would hide: for a loss, and for the copy that an instrument takes."""


@pytest.fixture(scope="module")
def case_judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CaseJudge]]:
    """Return a judge of cases for the default schedule, and one for an eager device."""
    with Pools() as pools:
        yield {
            accelerator: CaseJudge(
                tmp_path_factory.mktemp("records"),
                pools,
                hardware=find_hardware(FakeDevices(), accelerator=accelerator, share_gpu="auto"),
            )
            for accelerator in ("sim", "sim:eager")
        }


def require(
    case_judges: dict[str, CaseJudge],
    verdict: Verdict,
    law: str,
    cell: Cell,
    *,
    defect: str | None = None,
    accelerator: str = "sim",
) -> str:
    """Require a verdict, or `unsupported` where nothing can compile the device; returns the reason, empty there."""
    (result,) = case_judges[accelerator].judge([Case(law, cell)], defect=defect, deadline_s=DEADLINE_S)
    assert result.verdict == (verdict if library() else Verdict.UNSUPPORTED), result.reason
    return result.reason if library() else ""


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
        # `torch.amp.GradScaler` alone lets the host read its scale before the copy ends, see `loss_scale.LossScaler`.
        ("STREAM-6", DP2.but(offload="cpu", precision="fp16-mp")),
    ],
    ids=lambda value: value.id if isinstance(value, Cell) else value,
)
def test_a_law_judges(case_judges: dict[str, CaseJudge], law: str, cell: Cell) -> None:
    require(case_judges, Verdict.PASS, law, cell)


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
def test_a_law_fails(case_judges: dict[str, CaseJudge], defect: str, law: str, cell: Cell) -> None:
    require(case_judges, Verdict.FAIL, law, cell, defect=defect)


def test_memory_without_tables_is_not_enough(
    case_judges: dict[str, CaseJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound has room for the table, and for nothing that is as large."""
    if not traits_of(str(torch.__version__)).previous_gather_until_copied:
        return  # less is held while a group is copied out: the peak is at another time
    monkeypatch.setattr(memory_bounds, "largest_tables_bytes", lambda *_, **__: {})
    reason = require(case_judges, Verdict.FAIL, "MEM-10", TABLES)
    assert not reason or "peak of forward" in reason


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_caught_under_a_schedule(case_judges: dict[str, CaseJudge], name: str) -> None:
    cell, schedule = RACES[name]
    reason = require(case_judges, Verdict.FAIL, "STREAM-5", cell, defect=name, accelerator="sim:eager")
    assert not reason or reason.startswith(f"changed under schedule {schedule}: measured")


def test_a_source_of_an_offload_cannot_be_released_too_early_unless_its_target_is_pinned(
    case_judges: dict[str, CaseJudge],
) -> None:
    """The host waits for a copy to pageable memory, so that the defect shows with pinned memory alone."""
    pageable = REPLICAS.but(offload="cpu")
    require(case_judges, Verdict.PASS, "STREAM-5", pageable, defect="offload-source-released", accelerator="sim:eager")


@pytest.mark.parametrize("name", HIDDEN_BY_WAITS)
def test_a_race_is_found_in_the_trace_and_none_in_that_of_its_twin(
    case_judges: dict[str, CaseJudge], name: str
) -> None:
    """Under any schedule: the checker considers every timing of the streams."""
    reason = require(case_judges, Verdict.FAIL, "STREAM-6", DP2, defect=name)
    assert not reason or "/_fully_shard/" in reason
    require(case_judges, Verdict.PASS, "STREAM-6", DP2, defect=f"{name}.twin")
