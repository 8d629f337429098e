"""Sweep through torch's operator database: which differences count, and their reasons."""

from pathlib import Path

import pytest
import torch

from conformance.sim_runs.operators.cases import Case, Judged, Outcome
from conformance.sim_runs.operators.comparing import difference, snapshots
from conformance.sim_runs.operators.reasons import read_reasons
from conformance.sim_runs.operators.rendering import as_markdown, as_text, has_problems
from reference_trainer.checks import UsageError

KNOWN = Case("tensor_split", "float32", "view")
NEW = Case("tensor_split", "float32", "view"), Judged(Outcome.DIFFERS, "bits of result 0", 1)


def test_strides_that_mean_nothing_are_not_compared() -> None:
    row, column = torch.zeros(1, 2), torch.zeros(2, 1).t()
    assert row.stride() != column.stride()
    assert difference(snapshots("t", row), snapshots("t", column)) == ""
    assert difference(snapshots("t", torch.empty(0, 2)), snapshots("t", torch.empty(2, 0).t())) == ""


def test_other_strides_are_a_difference() -> None:
    one, other = torch.zeros(3, 2), torch.zeros(2, 3).t()
    assert difference(snapshots("t", one), snapshots("t", other)).startswith("strides of result 0")


def test_an_outcome_without_a_reason_is_a_problem() -> None:
    refused = {KNOWN: Judged(Outcome.REFUSED, "RuntimeError: on the host", 1)}
    assert not has_problems({"lazy": refused})
    assert has_problems({"lazy": refused, "eager": dict([NEW])})


def test_text_and_page_have_reasons_and_what_was_seen() -> None:
    sweep = {"lazy": {KNOWN: Judged(Outcome.REFUSED, "RuntimeError: on `sim`|host", 1)}}
    assert "as CUDA" in as_text(sweep)
    page = as_markdown(sweep)
    assert "torch takes indices from the host alone" in page
    assert "`RuntimeError: on sim/host`" in page


def test_a_reason_has_to_be_listed(tmp_path: Path) -> None:
    file = tmp_path / "reasons.yaml"
    file.write_text("reasons: {}\nrows:\n  - {operators: [x], reason: none, why: because}\n")
    with pytest.raises(UsageError, match=r"reasons\.yaml:3: no reason is called 'none'"):
        read_reasons(file)
