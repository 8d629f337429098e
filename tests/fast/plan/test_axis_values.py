"""Values of axes: each reaches the trainer's configuration, and none without effect is accepted."""

from typing import Any

import msgspec
import pytest

from conformance.plan.cells import Cell, axis_choices, axis_names


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


def test_every_axis_with_a_choice_is_varied() -> None:
    single = {name for name in axis_names() if len(axis_choices(name)) == 1}
    assert {name for name, _ in alternatives()} | single == set(axis_names())


# Axes that decide which runs there are, and not how a run of the reference trainer is configured.
AXES_OF_RUNS = ("record_streams", "expandable_segments", "saved_on", "saving", "batches")
NEEDED: dict[str, dict[str, Any]] = {
    "loss_scale": {"precision": "fp16-mp", "steps": 8},
    "reshard": {"mesh": "dp4"},
    "gradient_sync": {"mesh": "hsdp2x2", "accumulation": 2},
    "sequence_parallel": {"mesh": "tp2"},
    "loss_parallel": {"mesh": "tp2"},
    "pipeline": {"mesh": "pp2-dp2", "model": "cut", "accumulation": 2},
    "weights": {"init": "checkpoint"},
    "pin_memory": {"offload": "cpu"},
    "norms_in_tp": {"mesh": "tp2", "sequence_parallel": False},
    "implementation": {"init": "full"},
    "limit_all_gathers": {"init": "full", "implementation": "fsdp1"},
}


@pytest.mark.parametrize(("axis", "value"), alternatives(), ids=str)
def test_every_axis_reaches_the_trainer(axis: str, value: Any) -> None:
    if axis not in AXES_OF_RUNS:
        base = Cell(**NEEDED.get(axis, {}))
        assert base.but(**{axis: value}).config != base.config


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


def test_every_cell_has_a_valid_configuration_of_its_own() -> None:
    others = [(axis, value) for axis, value in alternatives() if axis not in AXES_OF_RUNS]
    cells = [Cell(), *(Cell(**{**NEEDED.get(axis, {}), axis: value}) for axis, value in others)]
    configurations = {msgspec.json.encode(cell.config) for cell in cells}
    assert len(configurations) == len({cell.id for cell in cells}) == len(cells)
    assert {cell.config.device for cell in cells} == {"cpu"}
