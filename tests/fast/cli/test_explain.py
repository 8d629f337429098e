"""`conformance explain`: ids of cases, and the answer for each outcome of a case and of its run with taps."""

from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli import explain
from conformance.cli.explain import CaseExplained, as_lines, explained_case, read_case
from conformance.detection.case_judge import the_matrix
from conformance.judge.judge import Judged
from conformance.judge.measurements import Measurement
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed, Failure
from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import Case
from conformance.report.location import Location
from conformance.report.module_tree import tree_lines
from conformance.run.store import RecordStore
from reference_trainer.checks import UsageError
from tests.support.sample_reports import deviation, location

MATRIX = the_matrix()
TP2, FULL = "tp2-fp32-default-meta", "dp2-fp32-default-full"
CASE = Case("PAR-1", cell_from_id(TP2))


# Ids


def test_ids_of_cases() -> None:
    assert read_case(f"par-1/{TP2}", MATRIX) == (CASE, None)
    law = MATRIX.trainer_laws()[0]
    fabric = Case(law, cell_from_id(FULL), "own:build")
    assert read_case(f"{law}/own:build/{FULL}", MATRIX) == (fabric, "own:build")
    own = Case(law, cell_from_id(FULL), "own:build")
    assert read_case(f"{law}/{FULL}", MATRIX, subject="some/own.py:build") == (own, "some/own.py:build")
    assert read_case(f"{law}/own:build/{FULL}", MATRIX, subject="some/own.py:build") == (own, "some/own.py:build")


@pytest.mark.parametrize(
    ("text", "subject", "message"),
    [
        (TP2, None, f"`{TP2}` is no id of a case: write LAW/CELL, "),
        (f"PAR-111/{TP2}", None, "no law has the id `PAR-111`; near: PAR-1"),
        ("PAR-1/tp2-fp32-defalt-meta", None, f"no cell has the id `tp2-fp32-defalt-meta`; near: {TP2}, "),
        (f"PAR-1/acelerate/{FULL}", None, "unknown subject `acelerate`; allowed: "),
        (f"PAR-1/{FULL}", "own:build", "no law of any trainer has the id `PAR-1`"),
        (f"ANY-1/own:build/{FULL}", "other:build", f"`ANY-1/own:build/{FULL}` is a case of own:build, and --subject"),
        ("PAR-1/dp1-fp32-default-meta-nosp", None, "PAR-1 is not judged on dp1-fp32-default-meta-nosp: "),
        (f"PAR-2/{TP2}", None, f"PAR-2 is not judged on {TP2}: see `conformance show PAR-2`"),
    ],
)
def test_cases_that_are_none(text: str, subject: str | None, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_case(text, MATRIX, subject=subject)
    assert str(caught.value).startswith(message)


def test_a_mistake_is_one_line_and_exit_status_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"PAR-1/{TP2}", "--defect", "nonsense"]) == 4
    assert capsys.readouterr().err.startswith("conformance: --defect nonsense: not a known defect")


# Answers


def answer(verdict: Verdict, found: Location | CellFailed | None, directory: Path) -> CaseExplained:
    """Return the answer for a case with this verdict, whose run with taps ends in this way."""
    metrics = {"loss": deviation(0.5)}
    why = "" if verdict == Verdict.PASS else f"why {verdict}"

    def explained(
        case: Case, store: RecordStore, *, machine: Machine, measured: Mapping[str, Measurement], reason: str
    ) -> Location | None:
        assert (case, measured, reason, machine.torch_version) == (CASE, metrics, why, store.torch_version)
        if isinstance(found, CellFailed):
            raise found
        return found

    store = RecordStore(directory=directory, session="s", torch_version="2.13.0", defect=None, deadline_s=1.0)
    error = KeyError("a bug") if verdict == Verdict.ERROR else None
    judged = Judged(CASE, "gloo", verdict, why, metrics, error=error)
    with patch.object(explain, "judge", return_value=judged):
        return explained_case(CASE, store, explained)


def test_a_first_wrong_place_is_shown_with_facts_and_tree(tmp_path: Path) -> None:
    place = location(CASE.id, seconds=2.04, agrees="", collective="", called=None)
    shown = answer(Verdict.FAIL, place, tmp_path)
    assert shown.status == 0
    lines, tree = list(as_lines(shown)), list(tree_lines(place))
    assert lines[-len(tree) :] == tree
    assert_expected_inline(
        "\n".join(lines[: -len(tree)]) + "\n",
        """\
fail: PAR-1/tp2-fp32-default-meta: why fail

first wrong: backward: layers.1.attention.wo, gradient of its input on tp rank 1 of 2, step 0; 0.5 x expected = 1/tp

cell    tp2-fp32-default-meta
kind    tensor
module  Linear
ranks   1
took    2.0 s

""",
    )
    assert msgspec.json.decode(msgspec.json.encode(shown), type=CaseExplained) == shown


UNFINISHED = CellFailed(Failure(kind="timeout", first_rank=0, reason="no result within 1 s", details=""))


@pytest.mark.parametrize(
    ("verdict", "found", "status", "last"),
    [
        (Verdict.PASS, None, 0, f"nothing is wrong on {TP2}"),
        (Verdict.PASS, location(CASE.id, tree={}), 0, "took    0.0 s"),
        (Verdict.FAIL, None, 1, f"no first wrong place: no tensor or collective with a tap is wrong on {TP2}"),
        (Verdict.PASS, UNFINISHED, 1, "no first wrong place: the run with taps did not finish: no result within 1 s"),
        (Verdict.CRASH, UNFINISHED, 1, "no first wrong place: the run with taps did not finish: no result within 1 s"),
    ],
)
def test_outcomes(
    tmp_path: Path, verdict: Verdict, found: Location | CellFailed | None, status: int, last: str
) -> None:
    shown = answer(verdict, found, tmp_path)
    assert (shown.status, "\n".join(as_lines(shown)).splitlines()[-1]) == (status, last)


def test_cases_that_cannot_be_judged_are_a_mistake_and_bugs_keep_their_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be judged here: why unsupported"):
        answer(Verdict.UNSUPPORTED, None, tmp_path)
    with pytest.raises(KeyError, match="a bug"):
        answer(Verdict.ERROR, None, tmp_path)
