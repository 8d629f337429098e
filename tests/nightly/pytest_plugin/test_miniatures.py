"""Session of faulty trainers: each gets its own verdict, and the healthy trainers between them pass."""

import re
from pathlib import Path

import pytest

from conformance.cli.verify import verify
from conformance.report.schema import CaseResult
from tests.support.matrices import write_matrix
from tests.support.miniatures import TRAINERS
from tests.support.sessions import Ended, alive, finish, suite

# A law that cannot see a fault passes: a shard of a single rank has no replica that differs.
DEADLINE_S = 15.0
MATRIX = """
schema: 2
axes: {mesh: [dp2]}
cells:
  trained:
    note: one trainer each
    axes: {mesh: [dp2], seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13]}
  replicated:
    note: ranks that hold the same elements
    axes: {mesh: [hsdp2x1, tp2], seed: [0, 9]}
  growth:
    note: memory
    axes: {mesh: [dp2], model: [even], optimizer: [sgd], seed: [0, 11]}
profiles:
  miniatures: {note: all trainers, must: [trained, replicated, growth], deadline_s: 15.0}
"""
VERDICTS = {
    "healthy": {"PAR-1": "pass", "PAR-5": "pass", "MEM-6": "pass"},
    "always_passes": {"PAR-1": "fail", "PAR-5": "fail"},
    "writes_nothing": {"PAR-1": "fail", "PAR-5": "fail"},
    "nan": {"PAR-1": "fail", "PAR-5": "pass"},
    "hangs": {"PAR-1": "timeout", "PAR-5": "timeout"},
    "segfaults": {"PAR-1": "crash", "PAR-5": "crash"},
    "exits_with_3": {"PAR-1": "crash", "PAR-5": "crash"},
    "exits_with_0": {"PAR-1": "crash", "PAR-5": "crash"},
    "raises": {"PAR-1": "fail", "PAR-5": "fail"},
    "diverges": {"PAR-1": "fail", "PAR-5": "pass"},
    "claims_unsupported": {"PAR-1": "fail", "PAR-5": "fail"},
    "leaks_memory": {"PAR-1": "pass", "PAR-5": "pass", "MEM-6": "fail"},
    "leaves_a_child": {"PAR-1": "pass", "PAR-5": "pass"},
    "prints_megabytes": {"PAR-1": "pass", "PAR-5": "pass"},
}
REASONS = {
    "always_passes": "rank 0 finished without phase data of step 0",
    "writes_nothing": "rank 0 finished without metrics of step 0",
    "hangs": "no result from ranks 0, 1 within [0-9.]+ s; rank 1 did not wait for a peer",
    "segfaults": "rank 1 was killed by SIGSEGV",
    "exits_with_3": "rank 1 exited with code 3",
    "exits_with_0": "rank 1 exited with code 0",
    "raises": "rank 1 raised ArithmeticError: on this rank only",
    "claims_unsupported": "rank [01] raised Skipped: needs 8 devices",
}
"""Patterns for the beginning of reasons that name a rank; of two equal failures either rank may be first."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_matrix(tmp_path_factory.mktemp("matrix") / "miniatures.yaml", MATRIX)


@pytest.fixture(scope="module")
def session(matrix: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp("miniatures") / "report"

    def to_the_end(_process: object) -> bool:
        return (directory / "report.json").exists()

    options = [
        "--matrix",
        str(matrix),
        "--defect",
        "tests/support/miniatures.py:by_seed",
        "--laws",
        "PAR-1,PAR-5,MEM-6",
    ]
    laws = [f"conformance/laws/{name}.py" for name in ("numerics/test_par", "memory/test_mem")]
    return finish(suite(directory, *laws, *options, profile="miniatures"), directory, act=to_the_end, limit_s=300)


def name_of(case: CaseResult) -> str:
    return list(TRAINERS)[int(case.cell.partition("-seed")[2] or 0)]


def test_each_gets_its_verdict(session: Ended) -> None:
    wrong = [
        f"{name_of(case)}: {case.law} is {case.verdict}, {case.reason}"
        for case in session.report.cases
        if case.cell.startswith("dp2") and case.verdict != VERDICTS[name_of(case)][case.law]
    ]
    assert wrong == []
    assert {name_of(case) for case in session.report.cases} == VERDICTS.keys() == TRAINERS.keys()


def test_replicas_that_diverge_are_seen(session: Ended) -> None:
    replicated = [case for case in session.report.cases if not case.cell.startswith("dp2")]
    assert len(replicated) == 2 * 2 * 2
    assert all((case.verdict == "fail") == case.cell.endswith("seed9") for case in replicated)


def test_reasons_name_the_rank_that_failed_first(session: Ended) -> None:
    for case in session.report.cases:
        expected = REASONS.get(name_of(case), "")
        assert re.match(expected, case.reason), case.id


def test_every_case_ends_in_time(session: Ended) -> None:
    # The deadline begins when the ranks have started, which takes seconds where other tests keep the processors busy.
    assert max(case.duration_s for case in session.report.cases) < DEADLINE_S + 10.0


def test_the_session_ends_well(session: Ended) -> None:
    report = session.report
    assert report.executed == report.planned == len(report.cases)
    assert (session.status, report.exit_code) == (1, 1), session.output
    assert alive(session.descendants) == []
    assert len(session.output) < 1 << 20, "what a rank prints is cut"


def test_the_report_can_be_verified(session: Ended, matrix: Path) -> None:
    """The verdicts on runs that died are verified too."""
    verified = verify(session.directory, matrix_file=matrix)
    assert verified.problems == []
    assert verified.cases == session.report.planned
