"""matrix.yaml: expansion to cells and cases, and every mistake with file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.plan.cells import Cell
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.selection import parse
from reference_trainer.strict_yaml import ConfigError

TEXT = """\
schema: 1
defaults: {steps: 4, clip: 0}
families:
  parity:
    laws: [PAR-10, PAR-2, MP-1]
    axes:
      mesh: [dp2, tp2, dp2-tp2]
      optimizer: [adamw, sgd]
    note: why
  reshard:
    laws: [RS-1, PAR-2]
    axes: {mesh: [dp2, tp2], reshard: [default, always]}
exclusions:
  - when: {reshard: always, tp: [2, 4]}
    reason: not implemented
    reference: torch/x.py
profiles:
  all: {families: all, deadline_s: 60}
  some:
    families: [reshard]
    cells: mesh = dp2
    deadline_s: 1.5
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def read(folder: Path, text: str) -> Matrix:
    path = folder / "matrix.yaml"
    path.write_text(text)
    return load_matrix(path)


def test_cells_of_a_family(folder: Path) -> None:
    matrix = read(folder, TEXT)
    base = Cell(steps=4, clip=0)
    parity = [base.but(mesh=mesh, optimizer=name) for mesh in ("dp2", "tp2", "dp2-tp2") for name in ("adamw", "sgd")]
    assert matrix.cells("parity") == tuple(parity)
    assert matrix.cells("reshard") == (base, base.but(reshard="always"), base.but(mesh="tp2"))
    assert matrix.excluded("parity") == ()
    assert matrix.excluded("reshard") == ((base.but(mesh="tp2", reshard="always"), matrix.exclusions[0]),)


def test_cases_of_a_profile(folder: Path) -> None:
    matrix = read(folder, TEXT)
    assert matrix.laws() == ("PAR-2", "PAR-10", "MP-1", "RS-1")
    base = Cell(steps=4, clip=0)
    always = base.but(reshard="always")
    assert matrix.cases("some") == (
        Case("PAR-2", base),
        Case("PAR-2", always),
        Case("RS-1", base),
        Case("RS-1", always),
    )
    assert [case.id for case in matrix.cases("some", only=parse("reshard = always"))] == [
        "PAR-2/dp2-fp32-always-meta-noclip-steps4",
        "RS-1/dp2-fp32-always-meta-noclip-steps4",
    ]
    assert matrix.cases("some", only=parse("reshard = never")) == ()
    cases = matrix.cases("all")
    assert [case.law for case in cases] == ["PAR-2"] * 7 + ["PAR-10"] * 6 + ["MP-1"] * 6 + ["RS-1"] * 3
    assert [case.cell for case in cases[:7]] == [*matrix.cells("parity"), always]
    assert matrix.profile("some").deadline_s == 1.5


def test_unknown_names(folder: Path) -> None:
    matrix = read(folder, TEXT)
    with pytest.raises(ValueError, match=r"unknown profile `sme`; allowed: all, some \(did you mean `some`\?\)"):
        matrix.cases("sme")
    for ask in (matrix.cells, matrix.excluded):
        with pytest.raises(ValueError, match=r"unknown family `parities`; allowed: parity, reshard \(did you mean"):
            ask("parities")


def test_digest_is_that_of_the_content(folder: Path) -> None:
    matrix = read(folder, TEXT)
    assert len(matrix.digest) == 64
    assert read(folder, TEXT.replace("{steps: 4, clip: 0}", "{clip: 0,   steps: 4} # x")).digest == matrix.digest
    assert read(folder, TEXT.replace("steps: 4", "steps: 5")).digest != matrix.digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 2", "1: Invalid enum value 2; allowed: 1 - at `$.schema`"),
        (
            "schema: 1",
            "scheme: 1",
            "1: unknown field `scheme`; allowed: schema, defaults, families, exclusions, profiles",
        ),
        ("schema: 1", "note: x", "1: unknown field `note`; allowed: schema"),
        ("steps: 4", "step: 4", "2: unknown axis `step`; allowed: mesh, "),
        ("steps: 4", "world: 4", "2: unknown axis `world`"),
        ("steps: 4", "steps: 010", "2: `010` is octal in YAML 1.1 and decimal in YAML 1.2: write it without"),
        ("steps: 4", "steps: four", "2: axis `steps` = 'four': Expected `int`, got `str` - at `$.defaults.steps`"),
        ("steps: 4", "steps: 4, steps: 4", "2: duplicate key `steps`"),
        ("steps: 4", "steps: [4]", "2: Expected `bool | int | float | str`, got `array` - at `$.defaults.steps`"),
        ("  parity:", "  Parity:", "4: Expected `str` matching regex '^[a-z0-9-]+\\\\Z' - at `$.families.Parity`"),
        ("[PAR-10, PAR-2, MP-1]", "[PAR10]", "5: Expected `str` matching regex '^[A-Z]+-[0-9]+\\\\Z' - at"),
        ("[PAR-10, PAR-2, MP-1]", "[]", "5: Expected `array` of length >= 1 - at `$.families.parity.laws`"),
        (", MP-1]", ",\n PAR-10]", "6: `PAR-10` is given twice: keep one of them - at `$.families.parity.laws[2]`"),
        ("mesh: [dp2, tp2, dp2-tp2]", "msh: [dp2]", "7: unknown axis `msh`; allowed: mesh, "),
        ("mesh: [dp2, tp2, dp2-tp2]", "mesh: []", "7: Expected `array` of length >= 1 - at"),
        ("mesh: [dp2, tp2, dp2-tp2]", "mesh: dp2", "7: Expected `array`, got `str` - at"),
        ("[dp2, tp2, dp2-tp2]", "[dp2,\n        tp1]", "8: axis `mesh` = 'tp1': not the canonical name"),
        ("[adamw, sgd]", "[adamw, sdg]", "8: axis `optimizer` = 'sdg': Invalid enum value 'sdg'; allowed: adamw, sgd"),
        ("[adamw, sgd]", "[sgd, adamw, sgd]", "8: `sgd` is given twice: keep one of them - at"),
        ("optimizer: [adamw, sgd]", "clip: [1, 1.0]", "8: `1.0` is given twice"),
        ("note: why", "nota: why", "9: unknown field `nota`; allowed: laws, axes, cover, note (did you mean `note`?)"),
        ("note: why", "cover: 1", "9: Expected `int` >= 2 - at `$.families.parity.cover`"),
        (
            "note: why",
            "cover: 3",
            "9: strength 3 needs at least as many axes with several values; there are 2 - at `$.families.parity.cover`",
        ),
        ("tp: [2, 4]", "tpp: 2", "14: unknown axis `tpp`; allowed: id, mesh, "),
        ("tp: [2, 4]", "tp: [2, '4']", "14: `tp` = '4': write a value of type int - at `$.exclusions[0].when.tp[1]`"),
        ("tp: [2, 4]", "tp: true", "14: `tp` = True: write a value of type int - at `$.exclusions[0].when.tp`"),
        ("tp: [2, 4]", "tp: []", "14: Expected `array` of length >= 1 - at `$.exclusions[0].when.tp`"),
        ("tp: [2, 4]", "tp: [2, 2]", "14: `2` is given twice: keep one of them - at `$.exclusions[0].when.tp[1]`"),
        ("tp: [2, 4]", "tp: 4", "14: matches nothing: remove or correct this exclusion - at `$.exclusions[0].when`"),
        (
            "{reshard: always, tp: [2, 4]}",
            "{reshard: k3}",
            "14: axis `reshard` = 'k3': Invalid enum value 'k3'; allowed",
        ),
        ("{reshard: always, tp: [2, 4]}", "{}", "14: Expected `object` of length >= 1 - at `$.exclusions[0].when`"),
        (
            "{reshard: always, tp: [2, 4]}",
            "{optimizer: adamw}",
            "10: all cells of `reshard` are excluded: remove the family, or add values to its axes - at",
        ),
        ("reason: not implemented", "reason: ' '", "15: Expected `str` matching regex '\\\\S' - at"),
        ("    reference: torch/x.py\n", "", "14: Object missing required field `reference` - at `$.exclusions[0]`"),
        ("families: all,", "families: al,", "18: Invalid enum value 'al'; allowed: list, all (did you mean `all`?)"),
        ("deadline_s: 60", "deadline_s: 0", "18: Expected `float` > 0.0 - at `$.profiles.all.deadline_s`"),
        (", deadline_s: 60", "", "18: Object missing required field `deadline_s` - at `$.profiles.all`"),
        (
            "[reshard]",
            "[reshar]",
            "20: unknown family `reshar`; allowed: parity, reshard (did you mean `reshard`?) - at",
        ),
        ("[reshard]", "[reshard, reshard]", "20: `reshard` is given twice: keep one of them - at"),
        ("[reshard]", "[]", "19: profile `some` selects nothing: name other families, or widen `cells` - at"),
        ("cells: mesh = dp2", "cells: mesh = tp8", "19: profile `some` selects nothing"),
        (
            "cells: mesh = dp2",
            "cells: mesh = dpp",
            "21: axis `mesh` = 'dpp': not a mesh; write dp2, tp4, dp2-tp2, hsdp2x2 (replicate x shard), hsdp2x2-tp2 or "
            "dp1, with numbers from 1 to 4096 - at `$.profiles.some.cells`\n  mesh = dpp\n         ^",
        ),
        ("cells: mesh = dp2", "cells: ''", "21: the expression ends too early; "),
    ],
)
def test_mistakes_have_a_line(folder: Path, old: str, new: str, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        read(folder, TEXT.replace(old, new))
    assert str(caught.value).removeprefix(f"{folder}/").startswith(f"matrix.yaml:{message}")


def test_a_covered_family(folder: Path) -> None:
    """Every pair of values but the excluded pairs occurs, in fewer cells than the product; other axes have defaults."""
    axes = "reshard: [default, always], accumulation: [1, 2, 4], optimizer: [sgd]"
    text = TEXT.replace(
        "axes: {mesh: [dp2, tp2], reshard: [default, always]}", f"cover: 2\n    axes: {{mesh: [dp2, tp2], {axes}}}"
    )
    matrix = read(folder, text)
    cells = matrix.cells("reshard")
    pairs = {(cell.mesh, cell.reshard) for cell in cells}
    assert pairs == {("dp2", "default"), ("dp2", "always"), ("tp2", "default")}
    assert {(cell.mesh, cell.accumulation) for cell in cells} == {(m, a) for m in ("dp2", "tp2") for a in (1, 2, 4)}
    assert {(cell.optimizer, cell.steps, cell.clip) for cell in cells} == {("sgd", 4, 0.0)}
    assert len(cells) < 2 * 3 * 2
    assert cells == read(folder, text).cells("reshard")
    assert matrix.excluded("reshard") == ()


def test_seeds_are_added_after_cells_are_selected(folder: Path) -> None:
    matrix = read(folder, TEXT)
    usual, seeded = (matrix.cases("some", only=parse("seed = 0"), seed=seed) for seed in (0, 7))
    assert [case.cell.seed for case in seeded] == [7] * len(usual)
    assert [case.cell.but(seed=0) for case in seeded] == [case.cell for case in usual]


AXES: dict[str, list[Any]] = {
    "mesh": ["dp1", "dp2", "tp2", "dp2-tp2", "hsdp2x2"],
    "precision": ["fp32", "bf16-mp"],
    "clip": [0.0, 0.5, 1.0],
    "accumulation": [1, 2, 4],
    "compile": [False, True],
}
# Never equal to a sampled cell, and hit by every sampled exclusion.
FIXED = {"laws": ["B-1"], "axes": {"mesh": ["dp1", "dp2", "tp4"], "compile": [False, True], "seed": [1]}}
FAMILIES = st.fixed_dictionaries(
    {}, optional={axis: st.lists(st.sampled_from(values), min_size=1, unique=True) for axis, values in AXES.items()}
)


@settings(deadline=None)
@given(axes=FAMILIES, worlds=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2, unique=True))
def test_expansion(folder: Path, axes: dict[str, list[Any]], worlds: list[int]) -> None:
    """The cells are the product of the axes less the exclusions, each once, and the same each time."""
    content = {
        "schema": 1,
        "families": {"sampled": {"laws": ["A-1", "B-1"], "axes": axes}, "fixed": FIXED},
        "exclusions": [{"when": {"world": worlds, "compile": True}, "reason": "x", "reference": "x"}],
        "profiles": {"all": {"families": "all", "deadline_s": 1}},
    }
    try:
        matrix = read(folder, json.dumps(content))
    except ConfigError as error:
        assert "all cells of `sampled` are excluded" in str(error)  # noqa: PT017 - some samples leave no cell
        return
    kept, excluded = matrix.cells("sampled"), [cell for cell, _ in matrix.excluded("sampled")]
    size = 1
    for values in axes.values():
        size *= len(values)
    assert len({cell.id for cell in (*kept, *excluded)}) == len(kept) + len(excluded) == size
    assert all(cell.compile and cell.world_size in worlds for cell in excluded)
    assert not any(cell.compile and cell.world_size in worlds for cell in kept)
    cases = matrix.cases("all")
    assert len({case.id for case in cases}) == len(cases) == 2 * len(kept) + len(matrix.cells("fixed"))
    assert cases == read(folder, json.dumps(content)).cases("all")
