"""Cells and meshes: canonical names, strict values, unique ids, and configurations of the trainer."""

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.plan import cells
from conformance.plan.cells import Cell, axis_choices, axis_names, axis_value, cell_from_axes, cell_from_id
from conformance.plan.mesh import AxisError, Mesh

SIZES = st.integers(1, 4096)
CHOICES = [
    *("precision", "reshard", "init", "optimizer", "accumulation", "forward_prefetch", "backward_prefetch"),
    *("gradient_sync", "activation_checkpointing"),
]
CELLS = st.builds(
    Cell,
    mesh=st.builds(Mesh, dp_replicate=SIZES, dp_shard=SIZES, tp=SIZES).map(lambda mesh: mesh.name),
    clip=st.sampled_from([0.0, -0.0, 1.0]) | st.floats(0, 1e300),
    dropout=st.sampled_from([0.0, 0.1]) | st.floats(0, 1, exclude_max=True),
    steps=st.integers(1, 30),
    seed=st.integers(0, 30),
    **{name: st.sampled_from(axis_choices(name)) for name in CHOICES},
    **{name: st.booleans() for name in ("sequence_parallel", "loss_parallel", "compile", "tied_embeddings")},
)


@pytest.mark.parametrize(
    ("text", "sizes", "world"),
    [
        ("dp1", (1, 1, 1, 1, 1, 1), 1),
        ("dp2", (1, 2, 1, 1, 1, 1), 2),
        ("tp4", (1, 1, 4, 1, 1, 1), 4),
        ("dp2-tp2", (1, 2, 2, 1, 1, 1), 4),
        ("hsdp2x2", (2, 2, 1, 1, 1, 1), 4),
        ("hsdp2x1", (2, 1, 1, 1, 1, 1), 2),
        ("hsdp2x3-tp4", (2, 3, 4, 1, 1, 1), 24),
        ("dp4096", (1, 4096, 1, 1, 1, 1), 4096),
        ("pp2", (1, 1, 1, 2, 1, 1), 2),
        ("dp4-ep2", (1, 4, 1, 1, 2, 1), 4),
        ("hsdp2x4-ep2", (2, 4, 1, 1, 2, 1), 8),
        ("dp4-tp2-cp2", (1, 4, 2, 1, 1, 2), 8),
        ("pp2-hsdp2x2-tp2", (2, 2, 2, 2, 1, 1), 16),
    ],
)
def test_mesh_names(text: str, sizes: tuple[int, ...], world: int) -> None:
    mesh = Mesh.parse(text)
    assert msgspec.structs.astuple(mesh) == sizes
    assert (mesh.name, mesh.world_size) == (text, world)


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


NO_MESHES = ("", "dp", "dp0", "dp02", "dp5000", "dp10000", "dp2tp2", "tp2-dp2", "dp2-pp2", "pp2dp2", "dp2-", "hsdp2")


@pytest.mark.parametrize("text", [*NO_MESHES, "DP2", "dp2\n", "dp\u0663"])
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
            {"mesh": "dp2-tp2", "precision": "bf16-mp", "reshard": "always", "optimizer": "sgd", "clip": 0}
            | {"accumulation": 2, "tied_embeddings": True},
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
            {"clip": 0.5, "sequence_parallel": False, "loss_parallel": True, "activation_checkpointing": "full"}
            | {"compile": True, "dropout": 0.1, "steps": 5, "seed": 7},
            "dp2-fp32-default-meta-clip0.5-nosp-lp-acfull-compile-drop0.1-steps5-seed7",
        ),
    ],
)
def test_ids_are_stable(axes: dict[str, Any], id_: str) -> None:
    """Ids are in the reports and baselines of users and must never change."""
    assert cell_from_axes(axes).id == id_


@settings(deadline=None)
@given(cell=CELLS, other=CELLS, axis=st.sampled_from(axis_names()))
def test_ids_are_unique_and_give_the_cell(cell: Cell, other: Cell, axis: str) -> None:
    assert re.fullmatch(r"[a-z0-9_.+-]+", cell.id)
    assert msgspec.json.decode(msgspec.json.encode(cell), type=Cell) == cell_from_id(cell.id) == cell
    assert (cell.id == other.id) == (cell == other)
    changed = cell.but(**{axis: getattr(other, axis)})
    assert (changed.id == cell.id) == (changed == cell) == (getattr(changed, axis) == getattr(cell, axis))


def test_every_axis_has_a_tag_a_default_and_is_documented_in_order() -> None:
    assert axis_names() == Cell.__struct_fields__
    assert {*cells._PREFIXES, *cells._SWITCHES} < {*axis_names()}
    assert axis_choices("accumulation") == (1, 2, 4, 8)
    assert axis_choices("mesh") == axis_choices("clip") == axis_choices("tp") == ()
    assert not set(axis_names()) & {"id", "features", "world", "dp_replicate", "dp_shard", "dp", "tp", "pp", "ep", "cp"}


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
    message = r"unknown axis `optimiser`; allowed: mesh, .*\(did you mean `optimizer`\?\)"
    with pytest.raises(AxisError, match=message):
        cell_from_axes({"optimiser": "sgd"})
    with pytest.raises(AxisError, match=message):
        Cell().but(optimiser="sgd")


@pytest.mark.parametrize(
    "text", ["", "?", "dp2", "dp3x-fp32-default-meta", "tp2-dp2-fp32-default-meta", "dp2-fp32-default-meta-steps3"]
)
def test_ids_of_no_cell(text: str) -> None:
    with pytest.raises(AxisError, match="no cell has the id"):
        cell_from_id(text)


def test_facts() -> None:
    facts = Cell(mesh="hsdp2x3-tp4", clip=0).facts()
    assert set(facts) == {
        *axis_names(),
        "id",
        "features",
        "world",
        "dp_replicate",
        "dp_shard",
        "dp",
        "tp",
        "pp",
        "ep",
        "cp",
    }
    derived = {"world": 24, "dp_replicate": 2, "dp_shard": 3, "dp": 6, "tp": 4, "pp": 1, "ep": 1, "cp": 1}
    assert {name: facts[name] for name in derived} == derived
    assert facts["id"] == "hsdp2x3-tp4-fp32-default-meta-noclip"
    assert Cell(mesh="hsdp2x3-tp4").world_size == 24
    assert Cell(mesh="hsdp2x2", seed=3).facts()["features"] == 0, "a mesh is no feature, and a seed neither"
    assert Cell(precision="fp32", clip=0, steps=8).features == 2
    assert isinstance(cell_from_axes({"clip": 1}).clip, float)
    assert cell_from_axes({"clip": 1, "dropout": 0}) == Cell(clip=1) == Cell()


@pytest.mark.parametrize("text", ['{"mesh": "tp1"}', '{"meshes": "dp2"}', '{"steps": 0}'])
def test_json_is_strict(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Cell)


# Values of axes: each reaches the trainer's configuration, and none without effect is accepted


def alternatives() -> list[tuple[str, Any]]:
    """Return (axis, value) pairs with another value than the default, for every axis that has another."""
    default = Cell()
    numbers = {"clip": 0.5, "dropout": 0.25, "saved_on": "dp4", "steps": 4, "seed": 1}
    pairs: list[tuple[str, Any]] = [("mesh", mesh) for mesh in ("dp1", "dp4", "tp2", "dp2-tp2", "hsdp2x2")]
    for name in axis_names():
        value = getattr(default, name)
        if type(value) is bool:
            pairs.append((name, not value))
        elif name in numbers:
            pairs.append((name, numbers[name]))
        else:
            pairs += [(name, choice) for choice in axis_choices(name) if choice != value]
    return pairs


# Axes that decide which runs there are, and not how a run of the reference trainer is configured.
AXES_OF_RUNS = ("record_streams", "expandable_segments", "saved_on", "saving", "batches")
NEEDED: dict[str, dict[str, Any]] = {
    "loss_scale": {"precision": "fp16-mp", "steps": 8},
    "reshard": {"mesh": "dp4"},
    "passes": {"accumulation": 2},
    "evaluation": {"accumulation": 2},
    "gradient_sync": {"mesh": "hsdp2x2", "accumulation": 2},
    "sequence_parallel": {"mesh": "tp2"},
    "loss_parallel": {"mesh": "tp2"},
    "pipeline": {"mesh": "pp2-dp2", "model": "cut", "accumulation": 2},
    "weights": {"init": "checkpoint"},
    "pin_memory": {"offload": "cpu"},
    "compiled": {"compile": True},
    "norms_in_tp": {"mesh": "tp2", "sequence_parallel": False},
    "implementation": {"init": "full"},
    "limit_all_gathers": {"init": "full", "implementation": "fsdp1"},
}


def test_every_axis_reaches_the_trainer_by_a_configuration_of_its_own() -> None:
    single = {name for name in axis_names() if len(axis_choices(name)) == 1}
    assert {name for name, _ in alternatives()} | single == set(axis_names())
    others = [(axis, value) for axis, value in alternatives() if axis not in AXES_OF_RUNS]
    for axis, value in others:
        base = Cell(**NEEDED.get(axis, {}))
        assert base.but(**{axis: value}).config != base.config
    varied = [Cell(), *(Cell(**{**NEEDED.get(axis, {}), axis: value}) for axis, value in others)]
    configurations = {msgspec.json.encode(cell.config) for cell in varied}
    assert len(configurations) == len({cell.id for cell in varied}) == len(varied)
    assert {cell.config.device for cell in varied} == {"cpu"}


@pytest.mark.parametrize(
    "axes",
    [
        {"weights": "hf"},
        {"weights": "rank0", "init": "full"},
        {"saving": "async"},
        {"loss_scale": "overflows"},
        {"loss_scale": "overflows", "precision": "fp16-mp"},
        {"sequence_parallel": False},
        {"loss_parallel": True},
        {"gradient_sync": "last"},
        {"gradient_sync": "all-reduce-last", "accumulation": 2},
        {"pipeline": "gpipe"},
        {"reshard": "k2"},
        {"reshard": "k2", "mesh": "dp4-tp2"},
    ],
    ids=str,
)
def test_an_axis_without_effect_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cell dp\d-.*: \w+ .*needs? "):
        _ = Cell(**axes).config
