"""Reports survive being written and read, and refuse unknown fields."""

import msgspec
import pytest

from conformance.judge.measurements import Measurement
from conformance.report.schema import CaseResult, Report
from tests.support.sample_reports import COVERAGE


def test_report_round_trip() -> None:
    case = CaseResult(
        id="PAR-1/dp2",
        law="PAR-1",
        must="It MUST.",
        cell="dp2",
        substrate="gloo",
        verdict="pass",
        reason="",
        duration_s=1.0,
        wait_s=0.0,
        run_s=0.5,
        measured={"loss": Measurement(kind="rounding", value=None, lower=0.0, upper=1.0, unit="nats")},
        repro="pytest",
        nodeid="x.py::y[dp2]",
    )
    assert msgspec.convert(msgspec.to_builtins(case), CaseResult) == case
    report = Report(
        session="s",
        environment={"torch": "2.13.0"},
        profile="pr",
        seed=0,
        started="2026-11-21T10:00:00",
        suite_digest="1",
        matrix_digest="0",
        defect=None,
        selection="",
        planned=1,
        executed=1,
        verdicts={"pass": 1},
        exit_code=0,
        duration_s=1.0,
        cells={},
        coverage=COVERAGE,
        cases=[case],
    )
    text = msgspec.json.encode(report)
    assert msgspec.json.decode(text, type=Report) == report
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"profile"', b'"proffile"'), type=Report)
