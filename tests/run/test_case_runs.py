"""Failures of runs: which of them are the suite's error and which the product's."""

import pytest
import torch

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.project import PACKAGE, PROJECT
from conformance.run.case_runs import to_failure
from conformance.run.failures import RunFailed
from conformance.run.ranks.messages import RankReport


def raised_at(file: str) -> RunFailed:
    report = RankReport(rank=1, state="raised", stamp_s=1.0, exception_type="E", message="m", innermost_file=file)
    ranks = (RankReport(rank=0, state="finished"), report)
    return RunFailed(kind="raised", first_rank=1, reason="rank 1 raised E: m", ranks=ranks)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (str(PACKAGE / "instruments" / "poison.py"), "suite-error"),
        (str(PACKAGE / "defects" / "loss_faults.py"), "suite-error"),
        (str(PACKAGE.with_name("conformance_of_others") / "x.py"), "raised"),
        (str(PROJECT / "reference_trainer" / "train.py"), "raised"),
        (torch.__file__, "raised"),
        ("<string>", "raised"),
        ("", "raised"),
    ],
)
def test_to_failure_blames_the_owner_of_the_innermost_file(file: str, kind: str) -> None:
    failure = to_failure(raised_at(file))
    assert (failure.kind, failure.first_rank, failure.reason) == (kind, 1, "rank 1 raised E: m")
    assert "--- rank 0 finished" in failure.details


def test_to_failure_of_an_operator_under_the_dispatch_tap_blames_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, DispatchTap([]):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    innermost = str(caught.traceback[-1].path)
    assert to_failure(raised_at(innermost)).kind == "raised"
