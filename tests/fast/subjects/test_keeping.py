"""Verdicts on trainers that are kept, and the table of them."""

from pathlib import Path

import msgspec
import pytest

from conformance.report.html import html_report
from conformance.report.text import markdown, terminal_lines
from conformance.report.trainer import FaultSeen, TrainerFacts
from conformance.subjects import keeping
from tests.support.sample_reports import case, report

TRAINER = TrainerFacts(
    name="other",
    given="package:Other",
    versions={"other": "1.0"},
    shims=["other._private"],
    policies=[],
    faults=[
        FaultSeen(fault="stale-shard", cell="dp2-fp32-default-full", laws=[]),
        FaultSeen(fault="local-norm", cell="dp2-fp32-default-full", laws=["clipping"]),
    ],
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, keeping.KeptSubject]:
    """Return the kept verdicts of a report."""
    monkeypatch.setattr(keeping, "DIRECTORY", tmp_path)
    cases = [
        case("loss/other/dp2-fp32-default-full"),
        msgspec.structs.replace(case("loss/other/hsdp2x2-fp32-default-full", "fail"), reason="rank 1 raised"),
        case("clipping/other/dp2-bf16mp-default-full", "unsupported"),
    ]
    assert keeping.keep(report(*cases, trainer=TRAINER)) == tmp_path / "other.json"
    return keeping.read_kept()


def test_verdicts_are_kept_and_shown(kept: dict[str, keeping.KeptSubject]) -> None:
    lines = [" ".join(line.split()) for line in keeping.table(kept).splitlines()]
    assert "| `loss` | **fail** on 1 of 2 |" in lines
    assert "| `clipping` | - |" in lines
    assert "- other: other 1.0; private names: `other._private`; faults seen: 1 of 2" in lines
    assert "- other fails loss on hsdp2x2-fp32-default-full: rank 1 raised" in lines


def test_reports_tell_of_a_blind_trainer_and_not_of_coverage() -> None:
    shown = report(case("loss/other/dp2-fp32-default-full"), trainer=TRAINER)
    for text in ("\n".join(terminal_lines(shown, "here")), markdown(shown), html_report(shown)):
        assert "blind to stale-shard on dp2-fp32-default-full: these verdicts do not count" in text
        assert "coverage" not in text.lower()
