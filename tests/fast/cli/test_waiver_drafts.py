"""Drafts of waivers, which become waivers when somebody has written an issue's address into them."""

import datetime
from pathlib import Path

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli.waive import NO_ISSUE, draft_waivers
from conformance.judge.measurements import Measurement
from conformance.judge.waivers import Symptom, Waivers
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from reference_trainer.strict_yaml import convert, load
from tests.support.sample_reports import case, report

LOSS = Measurement(kind="exact", value=2.5, lower=0.0, upper=0.0, unit="")
TODAY = datetime.date(2026, 11, 22)
FAILED = report(
    case("PAR-1/dp2-fp32-default-meta", "fail"),
    case("PAR-1/dp4-fp32-default-meta", "fail", loss=LOSS),
    case("MP-1/dp2-bf16mp-default-meta", "fail"),
    case("MP-3/dp2-bf16mp-default-meta", "timeout"),
    case("MP-5/dp2-bf16mp-default-meta"),
    torch="2.15.0+cpu",
)


def test_a_draft_for_each_law() -> None:
    assert_expected_inline(
        draft_waivers(FAILED, today=TODAY),
        """\
  - law: PAR-1
    cells: >-
      id = dp4-fp32-default-meta
    device: cpu
    torch: "2.15 - 2.15"
    issue: WRITE THE ADDRESS OF AN ISSUE
    reason: >-
      why fail
    expires: 2027-02-20
    shows:
      - metric: "loss"
        least: 2.5
        most: 2.5
  # fail, which no waiver covers: PAR-1/dp2-fp32-default-meta
  # fail, which no waiver covers: MP-1/dp2-bf16mp-default-meta
  # timeout, which no waiver covers: MP-3/dp2-bf16mp-default-meta""",
    )


def test_a_draft_is_refused_until_there_is_an_issue(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(
        FAILED.cases[0], reason="loss: measured 'x' # 50% [off], " * 12, measured={"loss #1: 'x'": LOSS}
    )
    text = "schema: 1\nwaivers:\n" + draft_waivers(msgspec.structs.replace(FAILED, cases=[odd]), today=TODAY)
    file = tmp_path / "waivers.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="issue"):
        convert(load(file), Waivers)
    file.write_text(text.replace(NO_ISSUE, "https://github.com/pytorch/pytorch/issues/1"))
    (waiver,) = convert(load(file), Waivers).waivers
    assert waiver.reason == odd.reason.strip()
    assert waiver.shows == [Symptom(metric="loss #1: 'x'", least=2.5, most=2.5)]
    assert waiver.matches(Case("PAR-1", Cell(mesh="dp2")), device="cpu", torch=(2, 15))
    assert not waiver.matches(Case("PAR-1", Cell(mesh="dp4")), device="cpu", torch=(2, 15))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(FAILED))
    assert main(["waive", "--from", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("  - law: PAR-1")
    assert main(["waive", "--from", str(tmp_path / "none")]) == 4
