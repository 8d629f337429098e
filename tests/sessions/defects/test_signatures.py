"""Signatures and definitions of defects, which are read from their source without torch."""

from pathlib import Path

import pytest

from conformance.defects.catalogue import Signature, defects, definitions, fault_module, signatures


def test_signatures_are_those_of_the_catalogue() -> None:
    in_catalogue = {Signature(defect.id, defect.laws, defect.cells, defect.hangs) for defect in defects()}
    assert set(signatures()) == in_catalogue
    assert len(signatures()) == len(defects())
    assert definitions().keys() == {defect.id for defect in defects()}


def test_a_computed_field_is_an_error() -> None:
    with pytest.raises(ValueError, match="malformed"):
        fault_module("@defect(laws_of('PAR'), '', 'source')\ndef a(benign):\n    pass\n")


MODULE = """
from conformance.defects.{other} import helper
CELLS = "mesh = dp2"
{shared}
@defect("PAR-1", CELLS, "source")
def first_fault(benign):
    return {first}
@defect("PAR-1 PAR-2", CELLS, "source", hangs=True)
def second_fault(benign):
    return {second}
"""
EDITS = """
third-fault:
  why: It is wrong.
  laws: [PAR-1]
  cells: mesh = dp2
  source: https://pytorch.org
  edits:
    - target: torch.nn
      old: {old}
"""


def changed(folder: Path, **change: str) -> set[str]:
    """Return the ids of the defects whose definitions differ with a change of one text."""
    texts = {"other": "b_faults", "shared": "x = 1", "first": "1", "second": "2", "old": "pass", "borrowed": "y = 1"}
    found = []
    for index, values in enumerate((texts, texts | change)):
        (here := folder / str(index)).mkdir()
        (here / "a_faults.py").write_text(MODULE.format(**values))
        (here / "b_faults.py").write_text(values["borrowed"])
        (here / "edits.yaml").write_text(EDITS.format(**values))
        found.append(definitions(here))
    assert found[0].keys() == found[1].keys() == {"first-fault", "second-fault", "third-fault"}
    return {name for name in found[0] if found[0][name] != found[1][name]}


@pytest.mark.parametrize(
    ("change", "defects"),
    [
        ({}, set()),
        ({"first": "3"}, {"first-fault"}),
        ({"second": "3"}, {"second-fault"}),
        ({"shared": "# a comment"}, {"first-fault", "second-fault"}),
        ({"shared": "x = 1  # a comment"}, set()),
        ({"borrowed": "y = 2"}, {"first-fault", "second-fault"}),
        ({"old": "raise"}, {"third-fault"}),
    ],
)
def test_a_change_of_one_defect_concerns_no_other(tmp_path: Path, change: dict[str, str], defects: set[str]) -> None:
    assert changed(tmp_path, **change) == defects
