"""Table of the simulated device's rules: its files, sources and probes, and the comparison with a device."""

from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.sim_runs.fidelity.measuring import Measured, as_json, read
from conformance.sim_runs.fidelity.probes import PROBES
from conformance.sim_runs.fidelity.report import as_markdown, comparison, differences, disagreements
from conformance.sim_runs.fidelity.rules import SOURCES, Fact, Rule, rules, table

FACTS = {name: dict(rule.expected) for name, rule in rules().items() if not rule.unmeasured}
"""Facts of a device that follows every rule."""


def measured(facts: dict[str, dict[str, Fact]] | None = None, *, device: str = "GPU") -> Measured:
    return Measured(device=device, torch="2.13.0", machine="x86_64", facts=FACTS | (facts or {}), failures={})


def test_each_source_file_follows_a_rule_or_is_said_to_follow_none() -> None:
    named = {file for rule in rules().values() for file in rule.files} | table().without_rules.keys()
    assert not named - {file.name for file in SOURCES.iterdir()}, "no such file"
    assert not {file.name for file in SOURCES.glob("*.cpp")} - named, "add its rules to rules.yaml"


def test_each_rule_is_measured_or_says_why_not() -> None:
    assert {name for name, rule in rules().items() if not rule.unmeasured} == PROBES.keys()


def test_sources_are_addresses_with_a_version_of_the_code() -> None:
    sources = {source for rule in rules().values() for source in rule.sources}
    assert all(source.startswith("https://") for source in sources)
    assert not [source for source in sources if "/blob/main/" in source]


def test_facts_without_a_probe_are_refused() -> None:
    with pytest.raises(ValueError, match="no expected facts"):
        Rule(rule="One.", unmeasured="cannot be", expected={"holds": True})


def test_a_gpu_is_compared_with_every_rule_and_the_simulated_device_where_it_does_not_deviate() -> None:
    assert not disagreements(measured())
    strided: dict[str, dict[str, Fact]] = {"strided-copies": {"reads the host's memory in its turn": True}}
    assert list(disagreements(measured(strided))) == ["strided-copies"]
    assert not disagreements(measured(strided, device="sim"))
    assert list(disagreements(measured({"item": {"waits for other streams": True}}, device="sim"))) == ["item"]


def test_a_probe_that_fails_and_one_that_lacks_the_machine() -> None:
    failed = Measured(device="GPU", torch="2.13.0", machine="", facts={}, failures={"item": "RuntimeError: no"})
    assert differences(rules()["item"], "item", failed) == ["the probe failed: RuntimeError: no"]
    assert not disagreements(measured({"peer-copies": {}}))


def test_the_comparison_has_each_fact_and_the_sum() -> None:
    text = comparison(measured({"sizes-in-512-bytes": {"bytes for 1": 256, "bytes for 512": 512}}))
    assert "bytes for 1: measured 256, expected 512" in text
    assert "bytes for 513: measured -, expected 1024" in text
    (total,) = (line for line in text.splitlines() if line.endswith("rules agree"))
    agreeing, judged = total.removesuffix(" rules agree").split(": ")[-1].split(" of ")
    assert int(agreeing) == int(judged) - 1


def test_facts_are_kept_and_shown_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fidelity.json"
    file.write_text(as_json(measured()))
    assert read(file) == measured()
    monkeypatch.setattr("conformance.sim_runs.fidelity.report.GPU_FACTS", tmp_path / "none.json")
    assert "unverified on a GPU" in as_markdown()
    assert "confirmed" not in as_markdown()
    monkeypatch.setattr("conformance.sim_runs.fidelity.report.GPU_FACTS", file)
    assert "confirmed" in as_markdown()


def test_a_gpu_that_is_not_there_is_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["sim", "fidelity", "--device", "cuda"]) == 4
    assert "needs a GPU" in capsys.readouterr().err
