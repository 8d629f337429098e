"""Faults of buffers that only a device shows: a test without a device proves that they reach their targets."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

from conformance.defects.catalogue import defects, injected
from conformance.detection.case_judge import CaseJudge
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.plan.substrates import STREAMS
from conformance.run.pool import Pools

ON_DEVICES = ("all-reduce-buffer-released", "offload-source-released", "offload-copy-not-awaited")


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools)


def test_defects_of_devices_name_devices_alone() -> None:
    assert {defect.id: defect.substrates for defect in defects() if defect.id in ON_DEVICES} == dict.fromkeys(
        ON_DEVICES, STREAMS
    )


@pytest.mark.parametrize("suffix", ["", ".twin"])
@pytest.mark.parametrize("name", ON_DEVICES)
def test_defects_of_devices_change_nothing_in_a_run_without_streams(
    case_judge: CaseJudge, name: str, suffix: str
) -> None:
    """The attributes that they replace exist in this torch."""
    replicas = Cell(mesh="hsdp2x2")
    cell = replicas.but(precision="bf16-reduce") if name.startswith("all") else replicas.but(offload="cpu")
    (judged,) = case_judge.judge([Case("STREAM-5", cell)], defect=name + suffix)
    assert judged.verdict == Verdict.PASS, judged.reason


class Stream:
    """Records the events that it waits for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def after_backward(monkeypatch: pytest.MonkeyPatch, name: str, *, offloaded: bool) -> tuple[bool, list[str]]:
    """Return whether a group keeps the buffer of its all-reduce, and the events that backward's stream waits for."""
    monkeypatch.setattr(fsdp.FSDPParamGroup, "post_backward", lambda _group: None)
    stream = Stream()
    group: Any = SimpleNamespace(
        _all_reduce_state="state",
        _post_reduce_event="reduced",
        fsdp_params=[SimpleNamespace(offload_to_cpu=offloaded)],
        device_handle=SimpleNamespace(current_stream=lambda: stream),
    )
    with injected(name):
        fsdp.FSDPParamGroup.post_backward(group)
    return group._all_reduce_state is not None, stream.waited


@pytest.mark.parametrize(("name", "offloaded"), [(ON_DEVICES[0], False), (ON_DEVICES[1], True)])
def test_a_buffer_is_dropped_early_or_after_a_wait(monkeypatch: pytest.MonkeyPatch, name: str, offloaded: bool) -> None:
    assert after_backward(monkeypatch, name, offloaded=offloaded) == (False, [])
    assert after_backward(monkeypatch, f"{name}.twin", offloaded=offloaded) == (False, ["reduced"])
    assert after_backward(monkeypatch, name, offloaded=not offloaded) == (True, [])


@pytest.mark.parametrize(("suffix", "waits"), [("", 0), (".twin", 2)])
def test_the_event_of_a_copy_is_forgotten_or_waited_for_twice(
    monkeypatch: pytest.MonkeyPatch, suffix: str, waits: int
) -> None:
    waited = []
    event = SimpleNamespace(synchronize=lambda: waited.append("copied"))
    group: Any = SimpleNamespace(fsdp_params=[SimpleNamespace(grad_offload_event=event)])

    def finalize_backward(self: Any) -> None:
        for param in self.fsdp_params:
            if param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()

    monkeypatch.setattr(fsdp.FSDPParamGroup, "finalize_backward", finalize_backward)
    with injected(ON_DEVICES[2] + suffix):
        patched: Any = fsdp.FSDPParamGroup
        patched.finalize_backward(group)
    assert len(waited) == waits
