"""Verdicts that exceptions mean, and the exit status of a session."""

from typing import Any

import pytest

from conformance.judge.verdicts import Verdict, classify, exit_status
from conformance.outcomes import CellFailed, ConformanceFailure, Failure, Unsupported


def cell_failed(kind: Any) -> CellFailed:
    return CellFailed(Failure(kind=kind, first_rank=1, reason="rank 1 did it", details="all\nranks"))


@pytest.mark.parametrize(
    ("error", "verdict", "reason"),
    [
        (ConformanceFailure("loss: 2 is not 1\nmore"), Verdict.FAIL, "loss: 2 is not 1"),
        (AssertionError(), Verdict.FAIL, "AssertionError"),
        (cell_failed("raised"), Verdict.FAIL, "rank 1 did it"),
        (cell_failed("crash"), Verdict.CRASH, "rank 1 did it"),
        (cell_failed("timeout"), Verdict.TIMEOUT, "rank 1 did it"),
        (cell_failed("suite-error"), Verdict.ERROR, "rank 1 did it"),
        (Unsupported("needs 8 CUDA devices, found 0"), Verdict.UNSUPPORTED, "needs 8 CUDA devices, found 0"),
        (pytest.skip.Exception("a skip is never a pass"), Verdict.ERROR, "Skipped: a skip is never a pass"),
        (KeyError("gone"), Verdict.ERROR, "KeyError: 'gone'"),
        (TimeoutError(), Verdict.ERROR, "TimeoutError: TimeoutError"),
    ],
)
def test_classify(error: BaseException, verdict: Verdict, reason: str) -> None:
    assert classify(error) == (verdict, reason)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([], 5),
        (["unsupported", "unsupported"], 5),
        (["pass"], 0),
        (["pass", "unsupported", "waived", "quality-warning"], 0),
        (["waived"], 0),
        (["pass", "fail"], 1),
        (["pass", "unexpected-pass"], 1),
        (["pass", "timeout"], 1),
        (["pass", "crash"], 1),
        (["pass", "error"], 3),
        (["fail", "error", "crash"], 3),
        (["pass", "not-run"], 5),
        (["fail", "error", "not-run"], 5),
    ],
)
def test_exit_status(verdicts: list[str], status: int) -> None:
    assert exit_status({Verdict(name): verdicts.count(name) for name in verdicts}) == status


def test_every_verdict_decides_the_exit_status() -> None:
    alone = {verdict.value: exit_status({verdict: 1}) for verdict in Verdict}
    assert alone == {
        "pass": 0,
        "quality-warning": 0,
        "unsupported": 5,
        "waived": 0,
        "fail": 1,
        "unexpected-pass": 1,
        "timeout": 1,
        "crash": 1,
        "error": 3,
        "not-run": 5,
    }
