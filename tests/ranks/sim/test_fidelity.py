"""Simulated device against the rules of its model, by the probes that also measure a GPU."""

from pathlib import Path

import msgspec

from tests.support.programs import output_of
from tests.support.simulated_processes import library


def test_the_device_follows_the_rules(tmp_path: Path) -> None:
    if library() is None:
        return
    file = tmp_path / "facts.json"
    output_of("-m", "conformance", "sim", "fidelity", "--device", "sim", "--json", str(file))
    assert not msgspec.json.decode(file.read_bytes())["failures"]
