"""Races on the simulated device: caught under a named schedule, or by the checker although waits hide them."""

from collections.abc import Iterator

import pytest

from conformance.detection.case_judge import CaseJudge
from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.run.devices.hardware import find_hardware
from conformance.run.pool import Pools
from tests.support.fake_devices import FakeDevices
from tests.support.simulated_processes import library

OFFLOADED = Cell(mesh="dp2").but(offload="cpu", pin_memory=True)
FP16_OFFLOADED = Cell(mesh="dp2").but(offload="cpu", precision="fp16-mp")
REPLICAS = Cell(mesh="hsdp2x1")
"""Two replicas that shard over one rank each: the fewest ranks that reduce over replicas."""
DEFECTS = {
    "all-reduce-buffer-released": (REPLICAS.but(precision="bf16-reduce"), "lazy"),
    "offload-source-released": (REPLICAS.but(offload="cpu", pin_memory=True), "starve:4"),
    "offload-copy-not-awaited": (OFFLOADED, "lazy"),
}
"""Cell that shows a defect, and a schedule under which its run differs from that of an eager device."""
HIDDEN_BY_WAITS = ("copy-in-before-optimizer", "gathered-released-in-forward")
"""Races on dp2 that the host's waits would hide: for a loss, and for the copy that an instrument takes."""
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    hardware = find_hardware(FakeDevices(), accelerator="sim:eager", share_gpu="auto")
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools, hardware=hardware)


def judged(case_judge: CaseJudge, name: str, suffix: str, *, law: str = "STREAM-5", cell: Cell | None = None) -> Judged:
    cell = cell or (DEFECTS[name][0] if name in DEFECTS else Cell(mesh="dp2"))
    (result,) = case_judge.judge([Case(law, cell)], defect=name + suffix, deadline_s=DEADLINE_S)
    return result


@pytest.mark.parametrize("name", DEFECTS)
def test_a_race_is_caught_under_a_schedule(case_judge: CaseJudge, name: str) -> None:
    result = judged(case_judge, name, "")
    if library() is None:
        assert result.verdict == Verdict.UNSUPPORTED
        return
    assert result.verdict == Verdict.FAIL, result.reason
    assert result.reason.startswith(f"changed under schedule {DEFECTS[name][1]}: measured"), result.reason


def test_a_source_of_an_offload_cannot_be_released_too_early_unless_its_target_is_pinned(case_judge: CaseJudge) -> None:
    """The host waits for a copy to pageable memory, so that the defect shows with pinned memory alone."""
    pageable = REPLICAS.but(offload="cpu")
    result = judged(case_judge, "offload-source-released", "", cell=pageable)
    assert result.verdict == (Verdict.PASS if library() else Verdict.UNSUPPORTED), result.reason


@pytest.mark.parametrize("name", HIDDEN_BY_WAITS)
def test_a_race_is_found_in_the_trace(case_judge: CaseJudge, name: str) -> None:
    """Under any schedule: the checker considers every timing of the streams."""
    result = judged(case_judge, name, "", law="STREAM-6")
    if library() is None:
        assert result.verdict == Verdict.UNSUPPORTED
        return
    assert result.verdict == Verdict.FAIL, result.reason
    assert "/_fully_shard/" in result.reason, result.reason


@pytest.mark.parametrize("name", HIDDEN_BY_WAITS)
def test_the_trace_of_a_twin_has_no_race(case_judge: CaseJudge, name: str) -> None:
    result = judged(case_judge, name, ".twin", law="STREAM-6")
    assert result.verdict == (Verdict.PASS if library() else Verdict.UNSUPPORTED), result.reason


def test_offloaded_gradients_are_unscaled_by_what_has_arrived(case_judge: CaseJudge) -> None:
    """`torch.amp.GradScaler` alone lets the host read its scale before the copy ends, see `loss_scale.LossScaler`."""
    (result,) = case_judge.judge([Case("STREAM-6", FP16_OFFLOADED)], defect=None, deadline_s=DEADLINE_S)
    assert result.verdict == (Verdict.PASS if library() else Verdict.UNSUPPORTED), result.reason
