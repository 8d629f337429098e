"""Cells and meshes: canonical names, strict values, unique ids."""

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.plan import cells
from conformance.plan.cells import Cell, axis_choices, axis_names, axis_value, cell_from_axes, cell_from_id
from conformance.plan.matrix import load_matrix
from conformance.plan.mesh import AxisError, Mesh
from conformance.project import PROJECT

SIZES = st.integers(1, 4096)
MESHES = st.builds(Mesh, dp_replicate=SIZES, dp_shard=SIZES, tp=SIZES)
CELLS = st.builds(
    Cell,
    mesh=MESHES.map(lambda mesh: mesh.name),
    precision=st.sampled_from(axis_choices("precision")),
    reshard=st.sampled_from(axis_choices("reshard")),
    init=st.sampled_from(axis_choices("init")),
    optimizer=st.sampled_from(axis_choices("optimizer")),
    clip=st.sampled_from([0.0, -0.0, 1.0]) | st.floats(0, 1e300),
    accumulation=st.sampled_from(axis_choices("accumulation")),
    forward_prefetch=st.sampled_from(axis_choices("forward_prefetch")),
    backward_prefetch=st.sampled_from(axis_choices("backward_prefetch")),
    gradient_sync=st.sampled_from(axis_choices("gradient_sync")),
    sequence_parallel=st.booleans(),
    loss_parallel=st.booleans(),
    activation_checkpointing=st.sampled_from(axis_choices("activation_checkpointing")),
    compile=st.booleans(),
    tied_embeddings=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]) | st.floats(0, 1, exclude_max=True),
    steps=st.integers(1, 30),
    seed=st.integers(0, 30),
)


@pytest.mark.parametrize(
    ("text", "sizes", "world"),
    [
        ("dp1", (1, 1, 1, 1), 1),
        ("dp2", (1, 2, 1, 1), 2),
        ("tp4", (1, 1, 4, 1), 4),
        ("dp2-tp2", (1, 2, 2, 1), 4),
        ("hsdp2x2", (2, 2, 1, 1), 4),
        ("hsdp2x1", (2, 1, 1, 1), 2),
        ("hsdp2x3-tp4", (2, 3, 4, 1), 24),
        ("dp4096", (1, 4096, 1, 1), 4096),
        ("pp2", (1, 1, 1, 2), 2),
        ("pp2-hsdp2x2-tp2", (2, 2, 2, 2), 16),
    ],
)
def test_mesh_names(text: str, sizes: tuple[int, int, int, int], world: int) -> None:
    mesh = Mesh.parse(text)
    assert msgspec.structs.astuple(mesh) == sizes
    assert (mesh.name, mesh.world_size) == (text, world)


@settings(deadline=None)
@given(mesh=MESHES)
def test_mesh_round_trip(mesh: Mesh) -> None:
    assert Mesh.parse(mesh.name) == mesh


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp1", "dp1"),
        ("dp1-tp2", "tp2"),
        ("dp2-tp1", "dp2"),
        ("hsdp1x2", "dp2"),
        ("hsdp1x1-tp3", "tp3"),
        ("-tp2", "tp2"),
        ("pp1-dp2", "dp2"),
        ("pp2-dp1", "pp2"),
    ],
)
def test_mesh_must_be_canonical(text: str, canonical: str) -> None:
    with pytest.raises(AxisError, match=f"{text!r}: not the canonical name of this mesh; write {canonical!r}"):
        Mesh.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dp",
        "dp0",
        "dp02",
        "dp5000",
        "dp10000",
        "dp2tp2",
        "tp2-dp2",
        "dp2-pp2",
        "pp2dp2",
        "dp2-",
        "hsdp2",
        "DP2",
        "dp2\n",
        "dp\u0663",
    ],
)
def test_mesh_must_be_a_mesh(text: str) -> None:
    with pytest.raises(AxisError, match=r"axis `mesh` = .*; write dp2, tp4, .* numbers from 1 to 4096"):
        Mesh.parse(text)


@pytest.mark.parametrize("size", [0, -1, 4097, True, 2.0])
def test_mesh_sizes(size: Any) -> None:
    with pytest.raises(AxisError, match=r"mesh dimension `tp` = .*: give an int from 1 to 4096"):
        Mesh(tp=size)


@pytest.mark.parametrize(
    ("axes", "id_"),
    [
        ({}, "dp2-fp32-default-meta"),
        ({"precision": "bf16-mp"}, "dp2-bf16mp-default-meta"),
        ({"optimizer": "adamw-foreach"}, "dp2-fp32-default-meta-adamwforeach"),
        ({"optimizer": "adamw-fused", "clip": 0.0}, "dp2-fp32-default-meta-adamwfused-noclip"),
        ({"optimizer": "sgd-momentum"}, "dp2-fp32-default-meta-sgdmomentum"),
        (
            {
                "mesh": "dp2-tp2",
                "precision": "bf16-mp",
                "reshard": "always",
                "optimizer": "sgd",
                "clip": 0,
                "accumulation": 2,
                "tied_embeddings": True,
            },
            "dp2-tp2-bf16mp-always-meta-sgd-noclip-acc2-tied",
        ),
        (
            {"mesh": "hsdp2x2", "precision": "bf16-init", "init": "checkpoint", "accumulation": 2}
            | {"gradient_sync": "all-reduce-last", "loss_parallel": True},
            "hsdp2x2-bf16init-default-checkpoint-acc2-syncallreducelast-lp",
        ),
        ({"forward_prefetch": 1, "backward_prefetch": 2}, "dp2-fp32-default-meta-fpre1-bpre2"),
        ({"precision": "bf16-reduce", "gradient_sync": "last"}, "dp2-bf16reduce-default-meta-synclast"),
        ({"precision": "bf16-mixed", "gradient_sync": "each"}, "dp2-bf16mixed-default-meta"),
        (
            {
                "clip": 0.5,
                "sequence_parallel": False,
                "loss_parallel": True,
                "activation_checkpointing": "full",
                "compile": True,
                "dropout": 0.1,
                "steps": 5,
                "seed": 7,
            },
            "dp2-fp32-default-meta-clip0.5-nosp-lp-acfull-compile-drop0.1-steps5-seed7",
        ),
    ],
)
def test_ids_are_stable(axes: dict[str, Any], id_: str) -> None:
    """Ids are in the reports and baselines of users and must never change."""
    assert cell_from_axes(axes).id == id_


@settings(deadline=None)
@given(first=CELLS, second=CELLS)
def test_ids_are_unique(first: Cell, second: Cell) -> None:
    assert re.fullmatch(r"[a-z0-9_.+-]+", first.id)
    assert (first.id == second.id) == (first == second)


@settings(deadline=None)
@given(cell=CELLS, data=st.data())
def test_every_axis_is_in_the_id(cell: Cell, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(axis_names()))
    value = getattr(data.draw(CELLS), axis)
    changed = cell.but(**{axis: value})
    assert (changed.id == cell.id) == (changed == cell) == (getattr(cell, axis) == value)


def test_every_axis_has_a_tag_a_default_and_is_documented_in_order() -> None:
    assert tuple(cells._TAGS) == axis_names() == Cell.__struct_fields__
    assert not set(axis_names()) & {"id", "features", "world", "dp_replicate", "dp_shard", "dp", "tp", "pp"}


@pytest.mark.parametrize(
    ("axis", "value", "message"),
    [
        ("mesh", 2, "Expected `str`, got `int`"),
        ("mesh", "tp1", "write 'dp1'"),
        ("precision", "bf16", "Invalid enum value 'bf16'; allowed: fp32, bf16-mp, bf16-init, bf16-reduce, "),
        ("reshard", True, "Expected `str`, got `bool`; allowed: always, never, default, except-last, k2, table, auto"),
        ("clip", -1, "Expected `float` >= 0.0"),
        ("clip", math.nan, "Expected `float` >= 0.0"),
        ("clip", math.inf, "Expected `float` <= "),
        ("clip", True, "Expected `float`, got `bool`"),
        ("clip", "1.0", "Expected `float`, got `str`"),
        ("accumulation", 3, "Invalid enum value 3; allowed: 1, 2, 4"),
        ("accumulation", True, "Expected `int`, got `bool`; allowed: 1, 2, 4"),
        ("compile", 1, "Expected `bool`, got `int`"),
        ("dropout", 1, "Expected `float` < 1.0"),
        ("steps", 0, "Expected `int` >= 1"),
        ("steps", 3.0, "Expected `int`, got `float`"),
        ("seed", -1, "Expected `int` >= 0"),
        ("seed", None, "Expected `int`, got `null`"),
    ],
)
def test_wrong_values(axis: str, value: Any, message: str) -> None:
    makers: list[Any] = [
        lambda: Cell(**{axis: value}),
        lambda: Cell().but(**{axis: value}),
        lambda: cell_from_axes({axis: value}),
        lambda: axis_value(axis, value),
    ]
    for make in makers:
        with pytest.raises(AxisError) as caught:
            make()
        assert f"axis `{axis}` = {value!r}: " in str(caught.value)
        assert message in str(caught.value)


def test_unknown_axis() -> None:
    makers: list[Any] = [
        lambda: cell_from_axes({"optimiser": "sgd"}),
        lambda: Cell().but(optimiser="sgd"),
    ]
    for make in makers:
        with pytest.raises(
            AxisError, match=r"unknown axis `optimiser`; allowed: mesh, .*\(did you mean `optimizer`\?\)"
        ):
            make()


def test_an_int_is_fine_for_a_float() -> None:
    cell = cell_from_axes({"clip": 1, "dropout": 0})
    assert cell == Cell()
    assert hash(cell) == hash(Cell())
    assert isinstance(cell.clip, float)
    assert Cell(clip=1, seed=2) == Cell(seed=2, clip=1.0)


@given(CELLS)
def test_the_id_of_a_cell_gives_the_cell(cell: Cell) -> None:
    assert cell_from_id(cell.id) == cell


def test_each_id_of_the_matrix_gives_its_cell() -> None:
    matrix = load_matrix(PROJECT / "matrix.yaml")
    cells_of_the_matrix = {case.cell for case in matrix.cases("nightly")}
    assert len(cells_of_the_matrix) > 100
    assert all(cell_from_id(cell.id) == cell for cell in cells_of_the_matrix)


@pytest.mark.parametrize(
    "text", ["", "?", "dp2", "dp3x-fp32-default-meta", "tp2-dp2-fp32-default-meta", "dp2-fp32-default-meta-steps3"]
)
def test_what_is_the_id_of_no_cell(text: str) -> None:
    with pytest.raises(AxisError, match="no cell has the id"):
        cell_from_id(text)


def test_facts() -> None:
    facts = Cell(mesh="hsdp2x3-tp4", clip=0).facts()
    assert set(facts) == {*axis_names(), "id", "features", "world", "dp_replicate", "dp_shard", "dp", "tp", "pp"}
    derived = {"world": 24, "dp_replicate": 2, "dp_shard": 3, "dp": 6, "tp": 4, "pp": 1}
    assert {name: facts[name] for name in derived} == derived
    assert facts["id"] == "hsdp2x3-tp4-fp32-default-meta-noclip"
    assert Cell(mesh="hsdp2x3-tp4").world_size == 24


def test_features_are_the_values_that_are_not_defaults() -> None:
    """A mesh is no feature, and a seed neither."""
    assert Cell(mesh="hsdp2x2", seed=3).facts()["features"] == 0
    assert Cell(precision="fp32", clip=0.0, steps=8).features == 2


def test_choices() -> None:
    assert axis_choices("saving") == ("blocking", "async")
    assert axis_choices("accumulation") == (1, 2, 4)
    assert axis_choices("mesh") == axis_choices("clip") == axis_choices("tp") == ()


@settings(deadline=None)
@given(cell=CELLS)
def test_json_round_trip(cell: Cell) -> None:
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell


@pytest.mark.parametrize("text", ['{"mesh": "tp1"}', '{"meshes": "dp2"}', '{"steps": 0}'])
def test_json_is_strict(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Cell)
