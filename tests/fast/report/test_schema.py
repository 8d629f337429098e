"""Reports survive being written and read, and refuse unknown fields."""

import msgspec
import pytest

from conformance.report.schema import Report
from tests.support.sample_reports import FACTS, case, deviation, report


def test_report_round_trip() -> None:
    shown = report(case("PAR-1/dp2", loss=deviation(None)), cells={"dp2": FACTS})
    text = msgspec.json.encode(shown)
    assert msgspec.json.decode(text, type=Report) == msgspec.convert(msgspec.to_builtins(shown), Report) == shown
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"profile"', b'"proffile"'), type=Report)
