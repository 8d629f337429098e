"""matrix.yaml: its cells and cases, and mistakes with file and line."""

from pathlib import Path

import pytest

from conformance.matrix_lock.derivation import estimated_s
from conformance.plan.cells import Cell
from conformance.plan.lock import STARTUP_S, PlannedCell
from conformance.plan.matrix import Case, Matrix
from conformance.plan.selection import parse
from reference_trainer.strict_yaml import ConfigError
from tests.support.matrices import written_matrix

TEXT = """\
schema: 2
axes:
  mesh: [dp2, tp2, dp2-tp2]
  optimizer: [adamw, sgd]
  reshard: [default, always]
alone:
  seed: [1]
cells:
  singles:
    note: each feature alone
    meshes: [dp2]
  pairs:
    note: any two meet
    strength: 2
  product:
    note: why
    axes: {mesh: [dp4], clip: [0.0, 1], reshard: [default, always]}
exclusions:
  - when: reshard = always and tp in (2, 4)
    reason: not implemented
    reference: torch/x.py
profiles:
  all: {note: all, must: [singles, pairs, product], deadline_s: 60}
  some:
    note: some
    must: [product]
    cells: clip > 0.0
    deadline_s: 1.5
  short: {note: short, budget_s: 19, deadline_s: 1}
"""
LAWS = """\
@law("PAR-10", where="mesh != tp2", reference="")
def test_ten(): ...
@law("PAR-2", where="optimizer = sgd", numbers=True)
def test_two(): ...
@law("ENV-1", where="features = 0")
def test_env(): ...
"""
MESHES = ("dp2", "tp2", "dp2-tp2")
PLAIN = Cell(mesh="dp2")
PRODUCT = tuple(Cell(mesh="dp4", clip=clip, reshard=mode) for clip in (0.0, 1.0) for mode in ("default", "always"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("matrix")
    (directory / "test_laws.py").write_text(LAWS)
    return directory


def read(folder: Path, text: str) -> Matrix:
    return written_matrix(folder / "matrix.yaml", text, laws_directory=folder)


def in_section(matrix: Matrix, name: str) -> tuple[Cell, ...]:
    return tuple(planned.cell for planned in matrix.planned if planned.section == name)


def test_singles_are_each_mesh_and_each_feature_alone(folder: Path) -> None:
    assert in_section(read(folder, TEXT), "singles") == (
        PLAIN,
        Cell(mesh="tp2"),
        Cell(mesh="dp2-tp2"),
        PLAIN.but(optimizer="sgd"),
        PLAIN.but(reshard="always"),
        PLAIN.but(seed=1),
    )


def test_a_single_has_the_options_that_its_feature_needs(folder: Path) -> None:
    """A feature that the section's mesh excludes is alone on another one."""
    text = TEXT.replace("  optimizer: [adamw, sgd]\n", "  optimizer: [adamw, sgd]\n  accumulation: [1, 2]\n")
    text = text.replace("reshard = always and tp in (2, 4)", "optimizer = sgd and accumulation = 1 or reshard = always")
    text = text.replace("reshard = always", "reshard = always and tp = 1").replace("mesh: [dp4]", "mesh: [tp4]")
    singles = in_section(read(folder, text), "singles")
    assert PLAIN.but(optimizer="sgd", accumulation=2) in singles
    assert Cell(mesh="tp2", reshard="always") in singles


def test_pairs_of_the_axes_of_the_matrix_meet_in_any_section(folder: Path) -> None:
    """Only pairs that earlier sections lack are added; values that stand alone have no part in it."""
    matrix = read(folder, TEXT)
    pairs = in_section(matrix, "pairs")
    seen = {(cell.mesh, cell.optimizer, cell.reshard) for cell in (*in_section(matrix, "singles"), *pairs)}
    assert {(mesh, name) for mesh, name, _ in seen} == {(m, o) for m in MESHES for o in ("adamw", "sgd")}
    assert {(mesh, mode) for mesh, _, mode in seen} == {*((m, "default") for m in MESHES), ("dp2", "always")}
    assert {(name, mode) for _, name, mode in seen} == {(o, r) for o in ("adamw", "sgd") for r in ("default", "always")}
    assert {cell.seed for cell in pairs} == {0}
    assert len(pairs) == 3


def test_a_product_has_all_cells_that_are_possible(folder: Path) -> None:
    assert in_section(read(folder, TEXT), "product") == PRODUCT
    with_tp = read(folder, TEXT.replace("mesh: [dp4]", "mesh: [dp4, tp4]"))
    tp4 = Cell(mesh="tp4")
    assert in_section(with_tp, "product") == (*PRODUCT, tp4.but(clip=0.0), tp4)


def test_an_array_of_its_own_has_the_values_of_its_axes_alone(folder: Path) -> None:
    axes = "{optimizer: [sgd], mesh: [dp2, dp4], accumulation: [1, 2, 4], reshard: [default, never]}"
    text = TEXT.replace("  product:\n    note: why\n", "  product:\n    note: why\n    strength: 2\n")
    text = text.replace("{mesh: [dp4], clip: [0.0, 1], reshard: [default, always]}", axes).replace("clip > 0.0", "tp=1")
    cells = in_section(read(folder, text), "product")
    assert {cell.optimizer for cell in cells} == {"sgd"}
    assert {(cell.mesh, cell.accumulation) for cell in cells} >= {(m, a) for m in ("dp2", "dp4") for a in (2, 4)}
    assert len(cells) < 2 * 3 * 2


def test_a_cell_belongs_to_the_first_section_that_has_it(folder: Path) -> None:
    matrix = read(folder, TEXT.replace("mesh: [dp4]", "mesh: [dp2, dp4]"))
    assert PLAIN in in_section(matrix, "singles")
    assert PLAIN not in in_section(matrix, "product")
    assert len(matrix.cells) == len(matrix.planned)


def test_cases_of_a_profile(folder: Path) -> None:
    matrix = read(folder, TEXT)
    assert matrix.laws() == ("ENV-1", "PAR-2", "PAR-10")
    dp4 = Cell(mesh="dp4")
    assert matrix.cases("some") == (Case("ENV-1", dp4), Case("PAR-10", dp4), Case("PAR-10", dp4.but(reshard="always")))
    assert [case.id for case in matrix.cases("some", only=parse("reshard = always"))] == ["PAR-10/dp4-fp32-always-meta"]
    assert matrix.cases("some", only=parse("reshard = never")) == ()
    assert matrix.profile("some").deadline_s == 1.5
    cases = matrix.cases("all")
    assert list(dict.fromkeys(case.cell for case in cases)) == list(matrix.cells.values())
    assert {case.law for case in cases if case.cell.mesh == "tp2"} == {"ENV-1", "PAR-2"}


def test_a_budget_has_the_first_cells_that_end_in_time(folder: Path) -> None:
    matrix = read(folder, TEXT)
    first_two_s = STARTUP_S + estimated_s(PLAIN) + estimated_s(Cell(mesh="tp2"))
    assert matrix.profile_cells("short", budget_s=first_two_s + 0.01) == (PLAIN, Cell(mesh="tp2"))
    assert matrix.profile_cells("short") == matrix.profile_cells("short", budget_s=19)
    assert matrix.profile_cells("short", budget_s=1e-3) == ()
    assert {cell.clip for cell in matrix.profile_cells("some", budget_s=1e6)} == {1.0}, "of the cells that it selects"
    assert matrix.profile_cells("all", budget_s=1e6) == tuple(matrix.cells.values())


def test_a_profile_has_its_sections_and_more_cells_if_its_budget_allows(folder: Path) -> None:
    """Cells are in the order of the plan, which is best first, and not in that of their sections."""
    must_s = sum(map(estimated_s, PRODUCT))
    budget_s = STARTUP_S + must_s + estimated_s(PLAIN) + 0.01
    text = TEXT.replace("budget_s: 19", f"budget_s: {budget_s}, must: [product]")
    assert read(folder, text).profile_cells("short") == (PLAIN, *PRODUCT)
    assert read(folder, TEXT.replace("budget_s: 19", "must: [product]")).profile_cells("short") == PRODUCT
    everything = read(folder, TEXT.replace("budget_s: 19", "must: all"))
    assert everything.profile_cells("short") == tuple(everything.cells.values())


def test_singles_of_own_axes_stand_on_their_meshes_alone(folder: Path) -> None:
    section = "meshes: [dp8]\n    base: {clip: 0.5}\n    axes: {optimizer: [sgd], init: [full, meta]}\n"
    base = Cell(mesh="dp8", clip=0.5)
    singles = in_section(read(folder, TEXT.replace("meshes: [dp2]\n", section)), "singles")
    assert singles == (base, base.but(optimizer="sgd"), base.but(init="full"))


def test_digest_is_that_of_the_content(folder: Path) -> None:
    matrix = read(folder, TEXT)
    assert len(matrix.digest) == 64
    assert read(folder, TEXT.replace("[adamw, sgd]", "[adamw,   sgd] # x")).digest == matrix.digest
    for old, new in (("[0.0, 1]", "[0.1, 1]"), ("deadline_s: 1.5", "deadline_s: 2.5")):
        assert read(folder, TEXT.replace(old, new)).digest != matrix.digest


AXES_ALLOWED = "; allowed: mesh, precision, "
FEW_AXES = "12: strength 3 needs at least as many axes with several values; there are 2 - at `$.cells.pairs`"
NO_MESH = (
    "27: axis `mesh` = 'dpp': not a mesh; write dp2, tp4, dp2-tp2, hsdp2x2 (replicate x shard), hsdp2x2-tp2, pp2-dp2, "
    "dp4-ep2, dp4-cp2 or dp1, with numbers from 1 to 4096 - at `$.profiles.some.cells`\n  mesh = dpp\n         ^"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[adamw, sgd]", "[sgd,\n    adamw, sgd]", "5: `sgd` is given twice: keep one of them - at `$.axes.optimizer"),
        ("seed: [1]", "seed: [one]", "7: axis `seed` = 'one': Expected `int`, got `str` - at `$.alone.seed[0]`"),
        ("seed: [1]", "sede: [1]", f"7: unknown axis `sede`{AXES_ALLOWED}"),
        ("    note: each feature alone\n", "", "9: Object missing required field `note` - at `$.cells.singles`"),
        ("meshes: [dp2]", "meshes: [dp2,\n      tp1]", "12: axis `mesh` = 'tp1': not the canonical name of this mesh"),
        ("meshes: [dp2]", "meshes: [dp2]\n    base: {optimiser: sgd}", "12: unknown axis `optimiser`; allowed: mesh, "),
        ("strength: 2", "strength: 2\n    base: {optimizer: sgd}", "15: only singles (`meshes`) have a base: give an"),
        ("strength: 2", "strength: 3\n    axes: {mesh: [dp2, tp2], optimizer: [adamw, sgd]}", FEW_AXES),
        ("[0.0, 1]", "[1, 1.0]", "17: `1.0` is given twice"),
        ("[0.0, 1]", "[-1]", "17: axis `clip` = -1: Expected `float` >= 0.0 - at `$.cells.product.axes.clip[0]`"),
        ("clip: [", "klip: [", f"17: unknown axis `klip`{AXES_ALLOWED}"),
        ("reshard = always and tp in (2, 4)", "features > 2", "19: an exclusion cannot ask for `features`: name axes"),
        ("reason: not implemented", "reason: ' '", "20: Expected `str` matching regex '\\\\S' - at"),
        ("pairs, product]", "pairs, pairs]", "23: `pairs` is given twice: keep one of them - at `$.profiles.all.must"),
        ("must: [singles, pairs, product]", "must: some", "23: "),
        ("clip > 0.0", "mesh = dpp", NO_MESH),
        ("budget_s: 19", "allows: [fail]", "29: Invalid enum value 'fail'; allowed: waived, unsupported - at"),
        ("budget_s: 19", "requires_devices: -1", "29: Expected `int` >= 0 - at `$.profiles.short.requires_devices`"),
    ],
)
def test_mistakes_have_a_line(folder: Path, old: str, new: str, message: str) -> None:
    """Mistakes beside those of `tests/sessions/wrong_inputs.txt`."""
    assert TEXT.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(folder, TEXT.replace(old, new))
    assert str(caught.value).removeprefix(f"{folder}/").startswith(f"matrix.yaml:{message}")


def test_seeds_are_added_after_cells_are_selected(folder: Path) -> None:
    matrix = read(folder, TEXT)
    usual, seeded = (matrix.cases("some", only=parse("seed = 0"), seed=seed) for seed in (0, 7))
    assert [case.cell.seed for case in seeded] == [7] * len(usual)
    assert [case.cell.but(seed=0) for case in seeded] == [case.cell for case in usual]


# Never equal to a sampled cell, and hit by every sampled exclusion.
def test_cells_of_a_profile_are_told_apart_without_comparing_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = read(folder, TEXT)

    def compared(_one: object, _other: object) -> bool:
        raise AssertionError("compared")

    monkeypatch.setattr(PlannedCell, "__eq__", compared)
    assert planned.profile_cells("some")
