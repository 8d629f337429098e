"""Scopes of laws: declarations of tests are read without importing them, and mistakes are named."""

from pathlib import Path

import pytest

from conformance.detection.case_judge import the_matrix
from conformance.judge.registry import asserted_laws
from conformance.plan.cells import Cell
from conformance.plan.matrix import TRAINER_CELLS
from conformance.plan.scopes import GAPS, Scope, declared_scopes, in_order, scope
from conformance.plan.selection import Facts, Selection
from conformance.project import LAWS_DIRECTORY


def declared(directory: Path, *declarations: str) -> dict[str, Scope]:
    lines = (f"{declaration}\ndef test_{number}(): ...\n" for number, declaration in enumerate(declarations))
    (directory / "test_laws.py").write_text("".join(lines))
    return declared_scopes(directory)


def test_declarations_are_those_of_the_decorator() -> None:
    decorated = {law: entry.law.scope for law, entry in asserted_laws().items()}
    declared = declared_scopes(LAWS_DIRECTORY) | declared_scopes(LAWS_DIRECTORY, of="any trainer")
    assert declared == decorated
    assert list(declared) == sorted(decorated, key=in_order)


def test_every_gap_leaves_a_cell_of_the_matrix_out_of_a_law() -> None:
    matrix = the_matrix()
    pairs = ((matrix.scopes, matrix.cells.values()), (matrix.trainer_scopes, TRAINER_CELLS))
    met = {
        gap
        for scopes, cells in pairs
        for facts in [[cell.facts() for cell in cells]]
        for declared in scopes.values()
        for gap in declared.gaps
        if any(declared.where.holds(each) and gap.selection.holds(each) for each in facts)
    }
    assert met == set(GAPS.values())
    judged = {case.law for profile in matrix.profiles for case in matrix.cases(profile)}
    assert judged == set(matrix.laws()), "every law is judged on a cell"


def test_a_gap_leaves_out_cells_of_where() -> None:
    judged = scope("PAR-1", where="tp = 1", gaps=["masks-of-micro-batches", "resumed"])
    plain, dropout = Cell(mesh="dp2"), Cell(mesh="dp2", dropout=0.1)
    assert judged.holds(plain)
    assert not judged.holds(dropout)
    assert not judged.holds(Cell(mesh="tp2"))
    assert judged.gap(dropout.facts()) is GAPS["masks-of-micro-batches"]
    assert judged.gap(plain.facts()) is None
    assert judged.gap(Cell(mesh="tp2", dropout=0.1).facts()) is None, "the law does not speak of it"


def test_other_decorators_and_files_declare_nothing(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("@law('PAR-2', where='tp = 1')\ndef test_other(): ...\n")
    assert list(declared(tmp_path, "@pytest.mark.slow\n@law('PAR-1', where='tp = 1')", "@other('PAR-3')")) == ["PAR-1"]
    (tmp_path / "ordered").mkdir()
    names = ("PAR-10", "PAR-9", "ENV-2", "AMP-1")
    found = list(declared(tmp_path / "ordered", *(f"@law('{name}', where='tp = 1')" for name in names)))
    assert found == ["ENV-2", "AMP-1", "PAR-9", "PAR-10"], "preconditions come first, and numbers ascend"


LITERALS = "test_laws.py:1: write id, `where`, `gaps`, `numbers`, `own_run` and `of` of a law as literals"
NOT_LITERAL = (
    "'PAR-1', where=WHERE",
    "PAR, where='tp = 1'",
    "'PAR-1'",
    "where='tp = 1'",
    "'PAR-1', where='', gaps=[*GAPS]",
)
TWICE = "@law('PAR-1', where='tp = 1')\ndef test_one(): ...\n@law('PAR-1', where='tp = 2')"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("@law('PAR-1', where='tpp = 1')", "law PAR-1: unknown name `tpp`; allowed: id, mesh, "),
        ("@law('PAR-1', where='tp = 1', gaps=['no-masks'])", "law PAR-1: unknown gap `no-masks`; allowed: masks-of-"),
        *((f"@law({arguments})", LITERALS) for arguments in NOT_LITERAL),
        (TWICE, "test_laws.py:3: law PAR-1 is declared twice"),
    ],
)
def test_mistakes(tmp_path: Path, declaration: str, message: str) -> None:
    with pytest.raises(ValueError, match="law") as caught:
        declared(tmp_path, declaration)
    assert str(caught.value).startswith(message)


def test_where_is_evaluated_once_for_a_cell() -> None:
    evaluated: list[Facts] = []

    def everywhere(facts: Facts) -> bool:
        evaluated.append(facts)
        return True

    judged = Scope("PAR-1", Selection("tp = 1", everywhere), (GAPS["pipelines"],))
    assert judged.judges(Cell().facts())
    assert not judged.judges(Cell(mesh="pp2-dp2").facts())
    assert len(evaluated) == 2
