"""Benchmarks fit the modules that they measure: each can be imported, and describes its options."""

import importlib
import sys

import pytest

from conformance.project import PROJECT

HELPERS = {"documents", "step_check"}
"""Modules that are no programs."""
NAMES = sorted(file.stem for file in (PROJECT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_describes_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    if name in HELPERS:
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
