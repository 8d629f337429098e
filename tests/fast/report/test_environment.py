"""Facts about the machine in every report."""

import msgspec
import psutil
import pytest
import torch

from conformance.report.environment import environment_facts
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.devices.nvml import Device


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


def test_what_a_machine_cannot_show() -> None:
    device = Device(uuid="GPU-1", name="H200", total_bytes=1)
    cannot_show = [
        environment_facts(hardware)["cannot_show"]
        for hardware in (NO_DEVICES, Hardware(devices=(device,), ranks_per_device=4), Hardware(devices=(device,)))
    ]
    assert cannot_show == [
        "NCCL, CUDA streams, GPU memory, pinned host memory",
        "bandwidth, overlap and peer-to-peer copies in worlds that share a GPU",
        "",
    ]
