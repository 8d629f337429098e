"""docs/subjects.md: verdicts that are kept, and the table of them."""

from pathlib import Path

import pytest

from conformance.judge.verdicts import Verdict
from conformance.subjects import keeping
from conformance.subjects.schema import FaultSeen, SubjectReport, SubjectVerdict


def verdict(law: str, cell: str, outcome: Verdict, reason: str = "") -> SubjectVerdict:
    return SubjectVerdict(law=law, suite_law="", cell=cell, verdict=outcome, reason=reason)


REPORT = SubjectReport(
    subject="other",
    torch="2.13.0",
    versions={"other": "1.0"},
    shims=["other._private"],
    verdicts=[
        verdict("loss", "other/dp2-fp32", Verdict.PASS),
        verdict("loss", "other/hsdp2x2-fp32", Verdict.FAIL, "rank 1 raised"),
        verdict("gradients", "other/hsdp2x2-fp32", Verdict.FAIL, "rank 1 raised"),
        verdict("clipping", "other/dp2-bf16", Verdict.UNSUPPORTED, "not declared"),
    ],
    policies=[],
    faults=[
        FaultSeen(fault="stale-shard", cell="other/dp2-fp32", laws=[]),
        FaultSeen(fault="local-norm", cell="other/dp2-fp32", laws=["clipping"]),
    ],
    duration_s=3.0,
)


def test_verdicts_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "DIRECTORY", tmp_path)
    assert keeping.keep("package:Other", REPORT) == tmp_path / "other.json"
    (kept,) = keeping.read_kept().values()
    assert kept.failures == ["loss, gradients on hsdp2x2-fp32: rank 1 raised"]
    lines = [" ".join(line.split()) for line in keeping.as_markdown({"other": kept}).splitlines()]
    assert "| `loss` | **fail** on 1 of 2 |" in lines
    assert "| `clipping` | - |" in lines
    row = "| other | `conformance judge package:Other` | other 1.0 | dp2-fp32, hsdp2x2-fp32 | "
    assert f"{row}stale-shard on other/dp2-fp32 | `other._private` | 3 s |" in lines


def test_a_blind_subject_is_not_conformant() -> None:
    assert REPORT.blind_to == ["stale-shard on other/dp2-fp32"]
    assert REPORT.status == 1
