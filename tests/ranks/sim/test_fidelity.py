"""Simulated device against the rules of its model, by the probes that also measure a GPU."""

import subprocess
import sys
from pathlib import Path

import msgspec

from conformance.project import PROJECT
from tests.support.simulated_processes import library


def test_the_device_follows_the_rules(tmp_path: Path) -> None:
    if library() is None:
        return
    file = tmp_path / "facts.json"
    command = [sys.executable, "-m", "conformance", "sim", "fidelity", "--device", "sim", "--json", str(file)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not msgspec.json.decode(file.read_bytes())["failures"]
