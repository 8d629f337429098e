"""Verdicts on subjects that are kept, and what shows them: docs/subjects/, and HTML."""

from pathlib import Path

import msgspec
import pytest

from conformance.judge.verdicts import Verdict
from conformance.subjects import keeping, overview
from conformance.subjects.catalogue import LAWS
from conformance.subjects.keeping import KeptSubject
from conformance.subjects.schema import FaultSeen, SubjectReport, SubjectVerdict
from tests.fast.report.test_html import outline


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


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, KeptSubject]:
    """Return what is read of the report after it was kept."""
    monkeypatch.setattr(keeping, "DIRECTORY", tmp_path)
    assert keeping.keep("package:Other", REPORT) == tmp_path / "other.json"
    return keeping.read_kept()


def test_verdicts_are_kept_and_shown(kept: dict[str, KeptSubject]) -> None:
    lines = [" ".join(line.split()) for line in overview.as_markdown(kept).splitlines()]
    assert "| `loss` | **fail** on 1 of 2 |" in lines
    assert "| `clipping` | - |" in lines
    row = "| other | `conformance judge package:Other` | other 1.0 | dp2-fp32, hsdp2x2-fp32 | "
    assert f"{row}1 of 2 on dp2-fp32, not stale-shard | `other._private` | 3 s |" in lines
    assert "loss, gradients on hsdp2x2-fp32: rank 1 raised" in lines


def test_html_opens_each_verdict_to_its_cells(kept: dict[str, KeptSubject]) -> None:
    text = overview.as_html(kept)
    parsed = outline(text)
    assert (parsed.open, parsed.loads) == ([], [])
    assert set(parsed.ids) == {law.id for law in LAWS}
    assert all(parsed.headers)
    words = " ".join(text.split())
    fails = '<li>hsdp2x2-fp32: <span class="fail">fail</span><br><small>rank 1 raised</small></li> </ul></details></td>'
    passes = '<li>dp2-fp32: <span class="pass">pass</span></li>'
    told = f'fail on 1 of 2</summary><ul class="wrap"> {passes} {fails}'
    assert f'<td class="fail"><details><summary>{told}' in words
    assert '<span class="unsupported">unsupported</span><br><small>not declared</small>' in words
    assert "dp2-fp32, local-norm: clipping" in words
    assert 'dp2-fp32, stale-shard: <span class="fail">no law sees it</span>' in words
    for expected in ("NOT conformant", f"2 of {len(LAWS)} laws fail", "NOT all seen", "other 1.0", "other._private"):
        assert expected in words, expected


def test_html_of_a_conformant_subject_and_of_what_it_says(kept: dict[str, KeptSubject]) -> None:
    script = "<script>alert(1)</script>"
    conformant = msgspec.structs.replace(
        kept["other"],
        laws={"loss": {"dp2-fp32": Verdict.PASS, "dp2-bf16": Verdict.UNSUPPORTED}},
        reasons={"loss": {"dp2-bf16": script}},
        faults={"dp2-fp32": {"stale-shard": ["loss"]}},
    )
    text = overview.as_html({"conformant": conformant, **kept})
    assert script not in text
    assert '<td class="pass"><details><summary>conformant</summary>' in text
    assert '<td class="pass"><details><summary>pass on 1</summary>' in text
    assert '<td class="pass"><details><summary>all seen</summary>' in text


def test_a_blind_subject_is_not_conformant() -> None:
    assert REPORT.blind_to == ["stale-shard on other/dp2-fp32"]
    assert REPORT.status == 1
