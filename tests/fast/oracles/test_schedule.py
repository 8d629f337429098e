"""Schedule model on known cases: the groups that FSDP gathers and reduces, and when."""

import msgspec
import pytest

from conformance.oracles.schedule import entered, fsdp_events, group_of, groups, kept_after_forward, shard_numels
from conformance.oracles.torch_versions import traits_of
from conformance.plan.cells import AxisValue, Cell, cell_from_axes
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

NUMBERS = {
    "tok_embeddings": 0,
    "layers.0": 1,
    "layers.0.attention_norm": 11,
    "layers.0.ffn_norm": 12,
    "layers.1": 2,
    "layers.1.attention_norm": 21,
    "layers.1.ffn_norm": 22,
    "norm": 30,
    "output": 3,
}
NUMELS = {group: 100 + number for group, number in NUMBERS.items()}
"""Elements of a shard by group: the size of an event tells its group."""


def config_and_dims(cell: Cell) -> tuple[TrainerConfig, ParallelDims]:
    config = cell.config
    return config, resolve_mesh(config.mesh, world_size=cell.world_size)


def schedule(**axes: AxisValue) -> str:
    """Return the events of a model of two blocks as text, such as `backward: G0 S3 R3`.

    `G0` is an all-gather of the embedding, `S3` a reduce-scatter of the output, `R3` its all-reduce.
    """
    config, dims = config_and_dims(cell_from_axes(axes))
    letters = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
    words, phase = [], ""
    for event in fsdp_events(config, dims, NUMELS):
        numel = event.numel // dims.dp_shard if event.kind == "reduce_scatter" else event.numel
        if event.phase != phase:
            phase = event.phase
            words.append(f"{phase}:")
        words.append(f"{letters[event.kind]}{numel - 100}")
    return " ".join(words)


FORWARD, REDUCES = "forward: G0 G1 G2 G3", "S3 S2 S1 S0"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"reshard": "always"}, f"{FORWARD} backward: G3 G2 S3 G1 S2 G0 S1 S0"),
        ({"reshard": "never"}, f"{FORWARD} backward: {REDUCES}"),
        ({"reshard": "default"}, f"{FORWARD} backward: G2 S3 G1 S2 G0 S1 S0"),
        ({"mesh": "hsdp2x2"}, f"{FORWARD} backward: G2 S3 R3 G1 S2 R2 G0 S1 R1 S0 R0"),
        ({"mesh": "dp1"}, ""),
        ({"mesh": "tp2"}, ""),
        ({"reshard": "never", "accumulation": 2}, f"{FORWARD} backward: {REDUCES} {FORWARD} backward: {REDUCES}"),
        # Gradients wait for the last micro-batch, but parameters are gathered again.
        (
            {"mesh": "dp2", "accumulation": 2, "gradient_sync": "last"},
            f"{FORWARD} backward: G2 G1 G0 {FORWARD} backward: G2 S3 G1 S2 G0 S1 S0",
        ),
        (
            {"mesh": "hsdp2x2", "accumulation": 2, "gradient_sync": "last"},
            f"{FORWARD} backward: G2 G1 G0 {FORWARD} backward: G2 S3 R3 G1 S2 R2 G0 S1 R1 S0 R0",
        ),
        (
            {"mesh": "hsdp2x2", "accumulation": 2, "reshard": "never", "gradient_sync": "all-reduce-last"},
            f"{FORWARD} backward: {REDUCES} {FORWARD} backward: S3 R3 S2 R2 S1 R1 S0 R0",
        ),
        # A tied weight is gathered first and reduced last.
        ({"tied_embeddings": True}, "forward: G3 G1 G2 backward: G2 G1 S2 S1 S3"),
        ({"tied_embeddings": True, "reshard": "always"}, "forward: G3 G1 G2 backward: G3 G2 G1 S2 S1 S3"),
        # Norms whose masters have another dtype are groups inside of blocks.
        (
            {"precision": "bf16-mixed"},
            "forward: G0 G1 G11 G12 G2 G21 G22 G30 G3 "
            "backward: S3 G2 S30 G22 G21 S22 G1 S21 S2 G12 G11 S12 G0 S11 S1 S0",
        ),
        ({"backward_prefetch": 1}, f"{FORWARD} backward: G2 S3 G1 S2 G0 S1 S0"),
        ({"backward_prefetch": 2}, f"{FORWARD} backward: G2 G1 S3 G0 S2 S1 S0"),
        ({"backward_prefetch": 2, "reshard": "always"}, f"{FORWARD} backward: G3 G2 G1 S3 G0 S2 S1 S0"),
        ({"backward_prefetch": 2, "reshard": "never"}, f"{FORWARD} backward: {REDUCES}"),
        ({"backward_prefetch": 2, "reshard": "table"}, f"{FORWARD} backward: G2 S3 G0 S2 S1 S0"),
    ],
)
def test_schedule(axes: dict[str, AxisValue], expected: str) -> None:
    assert schedule(**axes) == expected


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, "0:0 1:1 2:2 3:3"),
        ({"forward_prefetch": 1}, "0:0 0:1 1:2 2:3"),
        ({"forward_prefetch": 2}, "0:0 0:1 0:2 1:3"),
        ({"forward_prefetch": 2, "tied_embeddings": True}, "3:3 3:1 3:2"),
        ({"forward_prefetch": 2, "precision": "bf16-mixed"}, "0:0 0:1 0:11 1:12 11:2 12:21 2:22 21:30 22:3"),
    ],
)
def test_groups_prefetched_in_forward(axes: dict[str, AxisValue], expected: str) -> None:
    """`0:1`: the first block is gathered when the embedding is entered. The order of gathers is always the same."""
    events = fsdp_events(*config_and_dims(cell_from_axes(axes)), NUMELS)
    gathers = [f"{NUMBERS[event.during]}:{event.numel - 100}" for event in events if event.phase == "forward"]
    assert " ".join(gathers) == expected
    assert {event.during for event in events if event.phase == "backward"} == {""}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, "G3 G30 S3 G2 S30 G22 G21 G22 G21 S22 G3 S21 S2 G1 G12 G11 G12 G11 S12 G22 S11 S1 G0 S0"),
        ({"backward_prefetch": 1}, "G3 G30 S3 G2 S30 G22 G21 G22 G21 S22 G1 S21 S2 G12 G11 G12 G11 S12 G0 S11 S1 S0"),
    ],
)
def test_recomputation_gathers_norms_again_up_to_2_9(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, AxisValue], expected: str
) -> None:
    """Also groups that were left before, in the place of those that come next, as torch 2.9.1 was seen to do."""
    monkeypatch.setattr("conformance.oracles.schedule.traits_of", lambda _: traits_of("2.9.1"))
    measured = schedule(precision="bf16-mixed", activation_checkpointing="full", reshard="always", **axes)
    assert measured.partition("backward: ")[2] == expected


@pytest.mark.parametrize(("precision", "reduce"), [("bf16-mp", "float32"), ("bf16-reduce", "bfloat16")])
def test_schedule_dtypes_and_groups(precision: str, reduce: str) -> None:
    config, dims = config_and_dims(Cell(mesh="hsdp2x2").but(precision=precision))
    events = fsdp_events(config, dims, dict.fromkeys(NUMELS, 10))
    assert {(e.kind, e.group, e.numel, e.dtype) for e in events} == {
        ("all_gather", "dp_shard", 10, "bfloat16"),
        ("reduce_scatter", "dp_shard", 20, reduce),
        ("all_reduce", "dp_replicate", 10, reduce),
    }
    assert {(e.kind, e.nbytes) for e in events} >= {("all_gather", 20)}


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("always", []),
        ("never", ["tok_embeddings", "layers.0", "layers.1", "output"]),
        ("default", ["output"]),
        ("except-last", ["layers.1", "output"]),
        ("k2", []),
        ("table", ["layers.0", "output"]),
        ("auto", ["tok_embeddings", "layers.0", "layers.1", "output"]),
    ],
)
def test_kept_after_forward(mode: str, kept: list[str]) -> None:
    config, _ = config_and_dims(Cell(mesh="dp4", reshard=mode))  # type: ignore[arg-type]
    groups = ("tok_embeddings", "layers.0", "layers.1", "output")
    assert [group for group in groups if kept_after_forward(group, config)] == kept


def test_a_group_that_is_left_with_fewer_ranks_is_gathered_from_them() -> None:
    events = fsdp_events(*config_and_dims(Cell(mesh="dp4", reshard="k2")), NUMELS)
    gathers = [(e.phase, e.group, e.numel) for e in events if e.kind == "all_gather"]
    numels = [NUMELS[group] for group in ("tok_embeddings", "layers.0", "layers.1", "output")]
    assert gathers[:4] == [("forward", "dp_shard", numel) for numel in numels]
    assert gathers[4:] == [("backward", "dp_shard/2", 2 * numel) for numel in reversed(numels)]


def test_shards_of_uneven_rows() -> None:
    config, _ = config_and_dims(Cell())
    shapes = {
        "tok_embeddings.weight": (61, 8),
        "layers.0.attention.wq.weight": (6, 3),
        "layers.0.attention.wq.bias": (3,),
        "norm.weight": (8,),
        "output.weight": (61, 8),
    }
    # 61 rows over 4 ranks are 16 + 16 + 16 + 13: each shard is padded to 16.
    assert shard_numels(shapes, config, shards=4) == {
        "tok_embeddings": 16 * 8,
        "layers.0": 2 * 3 + 1,
        "output": 2 + 16 * 8,
    }
    assert list(shard_numels(shapes, config, shards=1).values()) == [488, 21, 496]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_every_parameter_has_a_group_of_the_forward_order(precision: str, tied: bool) -> None:
    config, _ = config_and_dims(Cell(tied_embeddings=tied).but(precision=precision))
    names = ["tok_embeddings.weight", "norm.weight", "output.weight"]
    names += [f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention_norm", "attention.wo", "ffn_norm")]
    assert {group_of(name, config) for name in names} == set(entered(groups(config)))


def test_an_unknown_mode_is_an_error() -> None:
    config, dims = config_and_dims(Cell())
    with pytest.raises(KeyError):
        fsdp_events(msgspec.structs.replace(config, gradient_sync="never"), dims, NUMELS)
    with pytest.raises(ValueError, match="fp8"):
        fsdp_events(msgspec.structs.replace(config, precision="fp8"), dims, NUMELS)
