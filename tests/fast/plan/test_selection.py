"""Selections of cells: the cells of an expression, and the column of a mistake."""

import pytest

from conformance.plan.cells import Cell, axis_choices, axis_names
from conformance.plan.selection import SelectionError, nearest, parse, parse_laws

CELL = Cell(mesh="dp2-tp2", clip=0, accumulation=2, compile=True)


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("mesh = dp2-tp2", True),
        ("mesh != dp2", True),
        ("mesh in (dp2, dp2-tp2)", True),
        ("mesh not in (dp2,dp2-tp2)", False),
        ("compile = true", True),
        ("compile != true", False),
        ("clip = 0", True),
        ("clip < 1e-3", True),
        ("clip in (0.5, 1)", False),
        ("steps < 3", False),
        ("steps <= 3", True),
        ("steps > 2", True),
        ("steps >= 4", False),
        ("tp > 1 and world = 4", True),
        ("dp = 2 and dp_shard = 2 and dp_replicate = 1", True),
        ("mesh = tp2 or tp = 2 and dp = 3", False),
        ("tp = 2 or tp = 3 and dp = 3", True),
        ("(tp = 2 or tp = 3) and dp = 3", False),
        ("not tp = 1 and dp = 2", True),
        ("not not tp = 2", True),
        ("id = dp2-tp2-fp32-default-meta-noclip-acc2-compile", True),
        ("id = dp2-*-acc2-*", True),
        ("id = dp2-*-acc2", False),
        ("dp2-tp2-fp32-default-meta-noclip-acc2-compile", True),
        ("not (dp4-* or dp2-*-acc2)", True),
        ("tp = 2 and dp2-*", True),
        ("mesh = *tp*", True),
        ("optimizer = adam*", True),
        ("mesh =\n  dp2-tp2\n", True),
    ],
)
def test_parse_selects(text: str, selected: bool) -> None:
    selection = parse(text)
    assert selection(CELL) is selected
    assert selection == parse(text)
    assert selection.text == text


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 0, "the expression ends too early; write comparisons such as `mesh = dp2`"),
        ("mesh =", 6, "the expression ends too early"),
        ("mesh = dp2 tp", 11, "`tp` cannot stand here; write comparisons"),
        ("mesh = dp2)", 10, "`)` cannot stand here"),
        ("mesh in ()", 9, "`)` cannot stand here"),
        ("tp @ 1", 3, "`@` cannot stand here"),
        ("tp = 1 AND dp = 1", 7, "`AND` cannot stand here"),
        ("all", 0, "`all` is no id of a cell, such as dp2-fp32-default-meta; write a comparison, or `all*`"),
        ("tp = 1 or dp2", 10, "`dp2` is no id of a cell, such as dp2-fp32-default-meta; write `mesh = dp2`, or `dp2*`"),
        ("mesh", 0, "`mesh` needs a value; write a comparison such as `mesh = dp2`"),
        ("PAR-1", 0, "`PAR-1` is no id of a cell: these have no capitals; laws are selected by --laws"),
        ("dp2-fp32-default-meta dp4-fp32-default-meta", 22, "`dp4-fp32-default-meta` cannot stand here"),
        ("tp = 1 and\nmsh = dp2", 11, "unknown name `msh`; allowed: id, mesh,"),
        ("optimiser = sgd", 0, "(did you mean `optimizer`?)"),
        ("mesh in (dp2, dq2)", 14, "axis `mesh` = 'dq2': not a mesh"),
        ("optimizer != adam", 13, "Invalid enum value 'adam'; allowed: adamw, sgd, adamw-foreach, adamw-fused, sgd-"),
        ("optimizer = a*x", 12, "`a*x` matches no value of `optimizer`; allowed: adamw, sgd"),
        ("steps = 0", 8, "Expected `int` >= 1"),
        ("steps = 1.5", 8, "`1.5` is no value of `steps`; write an integer"),
        ("steps = 010", 8, "`010` is no value of `steps`; write an integer"),
        ("tp = two", 5, "`two` is no value of `tp`; write an integer"),
        ("clip < nan", 7, "`nan` is no value of `clip`; write a number"),
        ("compile = yes", 10, "`yes` is no value of `compile`; write true or false"),
        ("mesh < dp2", 5, "`mesh` is not a number and has no order; use =, != or in (...)"),
        ("mesh != dp*", 8, "`dp*`: a pattern with `*` can only follow `=`"),
        ("tp > 1*", 5, "`1*`: a pattern with `*` can only follow `=`"),
        ("tp = 1*", 5, "`tp` is not a string and cannot match a pattern"),
    ],
)
def test_selection_error_points_at_the_mistake(text: str, column: int, message: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse(text)
    problem, shown, caret = str(caught.value).split("\n")
    assert message in problem
    assert shown == "  " + text.replace("\n", " ")
    assert caret == "  " + " " * column + "^"


def test_ids_are_the_words_with_most_hyphens() -> None:
    a, b = "dp2-fp32-default-meta", "dp2-fp32-defalt-meta-sgd"
    assert parse(f"id = {a} or id in ({b}, {a}) and not mesh = pp2-dp2-tp2").ids == [a, b, a]
    assert parse(a).ids == [a]
    assert parse(f"{a}-* or id = {a[:-1]}*").ids == []
    values = [str(value) for name in axis_names() for value in axis_choices(name)]
    assert max(value.count("-") for value in [*values, "pp2-hsdp2x2-tp2"]) < a.count("-")


def test_nearest_ids() -> None:
    laws = ("PAR-1", "PAR-10", "CLIP-1", "RS-1")
    assert nearest("par-11", laws)[:2] == ["PAR-1", "PAR-10"]
    assert nearest("ip", laws) == ["CLIP-1"]
    assert nearest("nonsense", laws) == []


LAWS = ("PAR-1", "PAR-10", "CLIP-1", "CLIP-2", "RS-1")


@pytest.mark.parametrize(
    ("text", "laws"),
    [
        ("PAR-1", ("PAR-1",)),
        ("rs-1, par-1", ("PAR-1", "RS-1")),
        ("clip-*", ("CLIP-1", "CLIP-2")),
        ("CLIP-2 PAR-*,PAR-1", ("PAR-1", "PAR-10", "CLIP-2")),
    ],
)
def test_laws_are_selected_in_their_order(text: str, laws: tuple[str, ...]) -> None:
    assert parse_laws(text, LAWS) == laws


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PAR", "no law matches `PAR`; allowed: PAR-*, CLIP-*, RS-* (did you mean `PAR-*`?)"),
        ("PAR-1 clop-1", "no law matches `CLOP-1`; allowed: PAR-*, CLIP-*, RS-* (did you mean `CLIP-*`?)"),
        (" , ", "no law is named: write ids or patterns, such as `PAR-1,CLIP-*`"),
    ],
)
def test_laws_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="law") as caught:
        parse_laws(text, LAWS)
    assert str(caught.value) == message
