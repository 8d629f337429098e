"""Facts in every report, about the machine and about cells, and the format of reports."""

from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from msgspec.structs import replace

from conformance.instruments.communication import Communication
from conformance.instruments.timing import StepTimes
from conformance.outcomes import Failure
from conformance.plan.cells import Cell
from conformance.report.facts import CellFacts, Collective, cell_facts, environment_facts
from conformance.report.schema import Report
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.devices.nvml import Device
from conformance.run.record import Header, RecordFile, write_record
from tests.support.sample_reports import FACTS, case, deviation, report

CELL = Cell(mesh="dp2", steps=3)


def rank(*times_s: float) -> dict[str, Any]:
    collective = {"phase": "forward", "kind": "all_gather", "group": "dp_shard", "dtype": "float32"}
    return {
        "steps": [{"step": step, "loss": 5.0 - step, "valid_tokens": 100} for step in range(3)],
        "step_s": list(times_s),
        "calibration_s": times_s[0] / 1000,
        "collectives": [{**collective, "step": step, "nbytes": 10 + step} for step in (0, 2, 2)],
        "communication": {"step_s": times_s[-1], "busy_s": 0.02, "exposed_s": 0.01},
        "something else": 1,
    }


def write(directory: Path, name: str, *, failed: bool = False, **header: Any) -> None:
    (directory / name).mkdir(parents=True)
    about = Header(**{"cell": CELL, "session": "s", "torch": "2", "substrate": "gloo", "defect": None, **header})
    failure = Failure(kind="raised", first_rank=0, reason="", details="") if failed else None
    ranks = msgspec.Raw(msgspec.json.encode([] if failed else [rank(9.0, 0.1, 0.3), rank(1.0, 0.2, 0.2)]))
    write_record(directory / name, RecordFile(header=about, ranks=ranks, failure=failure))


def test_facts_are_those_of_first_runs_of_the_session(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "again", repeat=1)
    write(tmp_path, "other", session="t", cell=CELL.but(seed=1))
    write(tmp_path, "measured", experiment="environment:probe", cell=CELL.but(seed=2))
    write(tmp_path, "failed", failed=True, cell=CELL.but(seed=3))
    facts = CellFacts(
        substrate="gloo",
        losses=[5.0, 4.0, 3.0],
        step_s=[0.2, 0.3],
        calibration_s=0.009,
        tokens_per_s=500.0,
        schedule=[Collective("forward", "all_gather", "dp_shard", "float32", 12)] * 2,
        communication=Communication(step_s=0.3, busy_s=0.02, exposed_s=0.01),
    )
    assert cell_facts(tmp_path, session="s") == {CELL.id: facts}
    assert cell_facts(tmp_path / "none", session="s") == {}
    twice = replace(facts, schedule=[facts.schedule[0], replace(facts.schedule[0], phase="backward")])
    assert twice.wire_bytes == {"all_gather dp_shard float32": 24}
    assert twice.collectives == {"backward all_gather dp_shard": 1, "forward all_gather dp_shard": 1}


def test_time_of_instruments_is_no_time_of_a_step() -> None:
    now = iter([0.0, 1.0, 4.0, 10.0, 20.0, 25.0])
    times = StepTimes(clock=lambda: next(now))
    times.phase("data", step=0)
    with times.excluded():
        pass
    times.phase("forward", step=0)
    times.phase("idle", step=0)
    times.phase("data", step=1)
    times.phase("idle", step=1)
    assert times.step_s == [7.0, 5.0]


def test_environment_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    monkeypatch.setenv("PASSWORD", "secret")
    facts = environment_facts(NO_DEVICES)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert facts["variables"]["TORCH_SOMETHING"] == "1"
    assert "secret" not in str(facts)
    assert (facts["substrate"], facts["device"]["type"]) == ("gloo", "cpu")
    assert "git" in facts
    assert msgspec.json.decode(msgspec.json.encode(facts)) == facts


def test_features_that_a_machine_cannot_show() -> None:
    device = Device(uuid="GPU-1", name="H200", total_bytes=1)
    for hardware, cannot_show in (
        (NO_DEVICES, "NCCL, CUDA streams, GPU memory, pinned host memory"),
        (
            Hardware(devices=(device,), ranks_per_device=4),
            "bandwidth, overlap and peer-to-peer copies in worlds that share a GPU",
        ),
        (Hardware(devices=(device,)), ""),
    ):
        assert environment_facts(hardware)["cannot_show"] == cannot_show


def test_report_round_trip() -> None:
    shown = report(case("PAR-1/dp2", loss=deviation(None)), cells={"dp2": FACTS})
    text = msgspec.json.encode(shown)
    assert msgspec.json.decode(text, type=Report) == msgspec.convert(msgspec.to_builtins(shown), Report) == shown
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"profile"', b'"proffile"'), type=Report)
