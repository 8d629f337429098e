"""Facts about the machine in every report."""

import msgspec
import psutil
import pytest
import torch

from conformance.report.environment import environment_facts
from conformance.run.devices.hardware import NO_DEVICES


def test_environment_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    monkeypatch.setenv("PASSWORD", "secret")
    facts = environment_facts(NO_DEVICES)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert facts["variables"]["TORCH_SOMETHING"] == "1"
    assert "secret" not in str(facts)
    assert (facts["substrate"], facts["device"]["type"], facts["cannot_show"]) == ("gloo", "cpu", "")
    assert "git" in facts
    assert msgspec.json.decode(msgspec.json.encode(facts)) == facts
