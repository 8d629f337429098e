"""Annotations for GitHub Actions, from reports of failures."""

import msgspec
import pytest

from conformance.judge.verdicts import Verdict
from conformance.report.github import annotations
from conformance.report.schema import CaseResult
from tests.support.sample_reports import case, report

DP2 = "dp2-fp32-default-meta"


@pytest.fixture(autouse=True)
def github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")


def failing(name: str, reason: str) -> CaseResult:
    return msgspec.structs.replace(case(name, "fail"), reason=reason)


def test_a_failure_is_an_error_with_law_cell_and_reason() -> None:
    (line,) = annotations(report(case(f"PAR-1/{DP2}", "fail")))
    assert line.startswith(f"::error title=fail%3A PAR-1/{DP2}::why fail%0Aknown faults with this signature: ")


def test_a_cause_is_one_error() -> None:
    (line,) = annotations(report(*(case(f"PAR-1/{mesh}-fp32-default-meta", "fail") for mesh in ("dp2", "dp4"))))
    assert line.startswith(f"::error title=fail%3A PAR-1/{DP2}::why fail%0A2 cases of PAR-1")


def test_special_characters_are_escaped() -> None:
    (line,) = annotations(report(failing("PAR-1/a,b", "100 %: a, b")))
    assert line == "::error title=fail%3A PAR-1/a%2Cb::100 %25: a, b"


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (Verdict.PASS, None),
        (Verdict.UNSUPPORTED, None),
        (Verdict.WAIVED, None),
        (Verdict.QUALITY_WARNING, "warning"),
        (Verdict.FAIL, "error"),
        (Verdict.UNEXPECTED_PASS, "error"),
        (Verdict.TIMEOUT, "error"),
        (Verdict.CRASH, "error"),
        (Verdict.ERROR, "error"),
    ],
)
def test_failures_are_errors_and_drift_is_a_warning(verdict: Verdict, kind: str | None) -> None:
    lines = annotations(report(case(f"PAR-1/{DP2}", verdict.value)))
    assert [line.split()[0] for line in lines] == ([f"::{kind}"] if kind else [])


def test_github_shows_ten() -> None:
    failures = [failing(f"PAR-1/{DP2}", f"why {letter}") for letter in "abcdefghijkl"]
    assert len(annotations(report(*failures))) == 10


def test_there_are_none_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert annotations(report(case(f"PAR-1/{DP2}", "fail"))) == []
