"""Another trainer in CI: annotations at the owner's line, the summary of a job, the warning on torch."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from conformance.plan.matrix import FAST_CELLS, TRAINER_CELLS, TRAINERS
from conformance.project import PROJECT
from conformance.report.html import html_report
from conformance.report.location import Code
from conformance.report.schema import Report
from conformance.report.text import annotations, headline, markdown, short_markdown, terminal_lines
from conformance.report.trainer import FaultSeen, TrainerFacts
from conformance.torch_release import TRIED, release, untried
from tests.support.sample_reports import case, location, report

TRAINER = "my_train:parallelize"
CELL = "dp2-fp32-default-full"


def judged(*, called: Code | None = None, faults: tuple[FaultSeen, ...] = ()) -> Report:
    failed = replace(case(f"gradients/{TRAINER}/{CELL}", "fail"), reason="100 % off, by\nrank | 1")
    trainer = TrainerFacts(name=TRAINER, given=TRAINER, versions={}, shims=[], policies=[], faults=list(faults))
    places = [location(failed.id, called=called)] if called else []
    return report(failed, case(f"loss/{TRAINER}/{CELL}"), trainer=trainer, locations=places, exit_code=1)


def test_an_annotation_stands_at_the_owners_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GitHub knows the files in the working directory alone: without one the trainer's own is named."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "src" / "a,b:c.py"
    file.parent.mkdir()
    file.touch()
    title = f"gradients[{CELL}] of my_train%3Aparallelize"
    for name in (str(file), "src/a,b:c.py"):
        (line,) = annotations(judged(called=Code(file=name, line=12, function="step")), is_asked=True)
        assert line.startswith(f"::error file=src/a%2Cb%3Ac.py,line=12,title={title}::100 %25 off, by rank | 1%0A")
    torch = judged(called=Code(file="torch/nn/x.py", line=1, function="f"))
    assert annotations(torch, is_asked=True)[0].startswith(f"::error title={title}::")
    (tmp_path / "my_train.py").touch()
    assert torch.trainer is not None
    named = replace(torch, trainer=replace(torch.trainer, given="my_train.py:parallelize"))
    assert annotations(named, is_asked=True)[0].startswith(f"::error file=my_train.py,title={title}::")


def test_annotations_are_for_github_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert annotations(judged()) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert len(annotations(judged())) == 1


def test_the_summary_of_a_job_is_a_short_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_train.py").touch()
    seen = FaultSeen(fault="stale-shard", cell=CELL, laws=["gradients"])
    blind = FaultSeen(fault="local-norm", cell=CELL, laws=[])
    text = short_markdown(judged(called=Code(file="my_train.py", line=12, function="step"), faults=(seen, blind)))
    assert text.startswith("## NOT CONFORMANT: torch 2.13.0")
    (row,) = [line for line in text.splitlines() if line.startswith("| `gradients`")]
    assert f"1 case, `{CELL}`" in row
    assert r"100 % off, by rank \| 1" in row
    assert row.rstrip(" |").endswith("my_train.py:12")
    assert f"faults seen: 1 of 2 on {CELL}" in text
    assert "|" not in short_markdown(replace(judged(), cases=[case(f"loss/{TRAINER}/{CELL}")]))


def test_a_release_without_verdicts_is_warned_of_everywhere() -> None:
    assert [untried(version) for version in ("2.13.0+cpu", "2.13.1", "2.15.0")] == ["", "", ""]
    warning = untried("2.16.0.dev20261101")
    assert warning.startswith("torch 2.16.0.dev20261101 was never tried with this suite (tried: 2.11, 2.13, 2.15)")
    environment = {**judged().environment, "untried_torch": warning}
    shown = replace(judged(), environment=environment)
    assert f"warning: {warning}" in terminal_lines(shown, "")
    for text in (markdown(shown), short_markdown(shown), html_report(shown)):
        assert "was never tried with this suite" in text
    assert "never tried" not in "\n".join(terminal_lines(judged(), "")) + html_report(judged())


def test_the_tried_releases_are_those_of_the_table_of_versions() -> None:
    header = re.search(r"^\| law +\|(.*)$", (PROJECT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert header is not None
    assert tuple(release(version.strip()) for version in header[1].strip("|").split("|")) == TRIED


def test_a_fast_session_says_what_it_does_not_judge() -> None:
    """All else that the profile has is judged on some cell."""
    fast = replace(judged(), profile=TRAINERS, selection="--fast")
    assert headline(fast).restrictions == ["only --fast", "7 of 15 cells, nothing about offloading, no fault tried"]
    assert "no fault tried" in headline(replace(fast, selection="--cells 'mesh = dp2' --fast")).restrictions[1]
    axes = ("mesh", "init", "precision", "accumulation", "batches", "tied_embeddings", "saved_on")
    for axis in axes:
        assert {getattr(cell, axis) for cell in FAST_CELLS} == {getattr(cell, axis) for cell in TRAINER_CELLS}, axis
    assert not any(cell.offload == "cpu" for cell in FAST_CELLS)
