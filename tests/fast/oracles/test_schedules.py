"""Models of schedules on known cases: gathers and reductions of FSDP, pipelines, traffic, and versions of torch."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any

import pytest
from msgspec.structs import replace

from conformance.oracles import pipeline
from conformance.oracles.clip_schedule import clip_events
from conformance.oracles.dtype_policy import unset_reduce_dtype
from conformance.oracles.schedule import (
    Event,
    entered,
    fsdp_events,
    group_of,
    groups,
    kept_after_forward,
    shard_numels,
)
from conformance.oracles.torch_versions import (
    FROM_2_15,
    UP_TO_2_8,
    UP_TO_2_9,
    UP_TO_2_11,
    UP_TO_2_12,
    UP_TO_2_14,
    VersionTraits,
    traits_of,
)
from conformance.oracles.tp_schedule import local_shapes, sharded_dim, tensor_parallel_events
from conformance.oracles.traffic import Traffic, add_up, ranks_in, sent_bytes, step_events
from conformance.plan.cells import AxisValue, Cell, cell_from_axes
from reference_trainer.config import DataConfig, MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

# Groups that FSDP gathers and reduces


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


def words(events: Iterable[Event], number: Callable[[Event], int]) -> str:
    """Return events with a number each by phase: G for an all-gather, S for a reduce-scatter, R for an all-reduce."""
    letters = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
    by_phase = groupby(events, key=attrgetter("phase"))
    return " ".join(" ".join([f"{phase}:", *(letters[e.kind] + str(number(e)) for e in es)]) for phase, es in by_phase)


def schedule(**axes: AxisValue) -> str:
    """Return the events of a model of two blocks with the groups' numbers, such as `backward: G0 S3 R3`."""
    config, dims = config_and_dims(cell_from_axes(axes))
    shards = {"reduce_scatter": dims.dp_shard}
    return words(fsdp_events(config, dims, NUMELS), lambda event: event.numel // shards.get(event.kind, 1) - 100)


@pytest.mark.parametrize("backward_prefetch", [0, 1])
def test_backward_after_an_evaluation_gathers_its_last_group_once_more(backward_prefetch: int) -> None:
    """See findings/gathers_after_evaluation.py. The embedding has no list, and follows the recorded order."""
    one = "forward: G0 G1 G2 G3 backward: G2 S3 G1 S2 G0 S1"
    evaluated = schedule(
        mesh="dp2", accumulation=2, evaluation="between-micro-batches", backward_prefetch=backward_prefetch
    )
    assert evaluated == f"{one} S0 evaluate: G0 G1 G2 G3 forward: G0 G1 G2 backward: G2 S3 G1 S2 G0 S1 G3 S0"


@pytest.mark.parametrize(("traits", "expected"), [(UP_TO_2_14, "R3 R2 R1 R0"), (FROM_2_15, "R3 R2 R1 R3 R2 R1 R0")])
def test_sums_that_wait_for_the_all_reduce_are_reduced_with_zeros(
    traits: VersionTraits, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.oracles.schedule.traits_of", lambda _version: traits)
    events = schedule(mesh="hsdp2x2", accumulation=4, passes=2, gradient_sync="all-reduce-last")
    assert " ".join(word for word in events.split() if word.startswith("R")) == expected


def test_columns_that_shards_divide_evenly_need_no_padding() -> None:
    config = Cell(mesh="dp4", shard_placement="columns").config
    shapes = {"tok_embeddings.weight": (61, 32), "norm.weight": (30,), "output.weight": (61, 30)}
    assert shard_numels(shapes, config, shards=4) == {"tok_embeddings": 61 * 8, "output": 8 + 16 * 30}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"reshard": "always"}, "F B G3 G2 S3 G1 S2 G0 S1 S0"),
        ({"reshard": "never"}, "F B S3 S2 S1 S0"),
        ({"reshard": "default"}, "F B G2 S3 G1 S2 G0 S1 S0"),
        ({"mesh": "hsdp2x2"}, "F B G2 S3 R3 G1 S2 R2 G0 S1 R1 S0 R0"),
        ({"mesh": "dp1"}, ""),
        ({"mesh": "tp2"}, ""),
        ({"reshard": "never", "accumulation": 2}, "F B S3 S2 S1 S0 F B S3 S2 S1 S0"),
        # Gradients wait for the last micro-batch, but parameters are gathered again.
        ({"mesh": "dp2", "accumulation": 2, "gradient_sync": "last"}, "F B G2 G1 G0 F B G2 S3 G1 S2 G0 S1 S0"),
        (
            {"mesh": "hsdp2x2", "accumulation": 2, "gradient_sync": "last"},
            "F B G2 G1 G0 F B G2 S3 R3 G1 S2 R2 G0 S1 R1 S0 R0",
        ),
        (
            {"mesh": "hsdp2x2", "accumulation": 2, "reshard": "never", "gradient_sync": "all-reduce-last"},
            "F B S3 S2 S1 S0 F B S3 R3 S2 R2 S1 R1 S0 R0",
        ),
        # A tied weight is gathered first and reduced last.
        ({"tied_embeddings": True}, "forward: G3 G1 G2 B G2 G1 S2 S1 S3"),
        ({"tied_embeddings": True, "reshard": "always"}, "forward: G3 G1 G2 B G3 G2 G1 S2 S1 S3"),
        # Norms whose masters have another dtype are groups inside of blocks.
        (
            {"precision": "bf16-mixed"},
            "forward: G0 G1 G11 G12 G2 G21 G22 G30 G3 B S3 G2 S30 G22 G21 S22 G1 S21 S2 G12 G11 S12 G0 S11 S1 S0",
        ),
        ({"backward_prefetch": 1}, "F B G2 S3 G1 S2 G0 S1 S0"),
        ({"backward_prefetch": 2}, "F B G2 G1 S3 G0 S2 S1 S0"),
        ({"backward_prefetch": 2, "reshard": "always"}, "F B G3 G2 G1 S3 G0 S2 S1 S0"),
        ({"backward_prefetch": 2, "reshard": "never"}, "F B S3 S2 S1 S0"),
        ({"backward_prefetch": 2, "reshard": "table"}, "F B G2 S3 G0 S2 S1 S0"),
        # Backward through the second pass frees groups that the first needs again, but for the embedding, whose input
        # has no gradient; gradients are complete in the first. Those that wait are reduced before: passes_reduce_twice.
        ({"mesh": "dp2", "accumulation": 2, "passes": 2}, "F G0 G1 G2 B G2 G1 G0 G3 G2 S3 G1 S2 S1 S0"),
        ({"accumulation": 2, "passes": 2, "reshard": "never"}, "F B G3 G2 S3 G1 S2 S1 S0"),
        (
            {"mesh": "dp2", "accumulation": 4, "passes": 2, "gradient_sync": "last"},
            "F G0 G1 G2 B G2 G1 G0 G3 G2 G1 F G0 G1 G2 B G2 S3 G1 S2 G0 S1 G3 G2 S3 G1 S2 S1 S0",
        ),
    ],
)
def test_schedule(axes: dict[str, AxisValue], expected: str) -> None:
    """Here F and B stand for the usual forward and the begin of a backward."""
    assert schedule(**axes) == expected.replace("B", "backward:").replace("F", "forward: G0 G1 G2 G3")


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
        fsdp_events(replace(config, gradient_sync="never"), dims, NUMELS)
    with pytest.raises(ValueError, match="fp8"):
        fsdp_events(replace(config, precision="fp8"), dims, NUMELS)


# Pipelines


PLAIN = Cell(mesh="pp2-dp2", model="cut", accumulation=4)
ACTIONS = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


def pipelined(schedule: str, *, reshard: str = "default") -> TrainerConfig:
    return PLAIN.but(pipeline=schedule, reshard=reshard).config


def actions(text: str) -> list[pipeline.Action]:
    """Return the actions that `F0.1 B0.1` spells: kind, stage and micro-batch."""
    kinds = {letter: kind for kind, letter in ACTIONS.items()}
    return [pipeline.Action(kinds[word[0]], *map(int, word[1:].split("."))) for word in text.split()]


def spelled(order: list[pipeline.Action]) -> str:
    return " ".join(f"{ACTIONS[kind]}{stage}.{index}" for kind, stage, index in order)


@pytest.mark.parametrize(
    ("schedule", "rank", "expected"),
    [
        ("gpipe", 0, "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3"),
        ("1f1b", 0, "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"),
        ("1f1b", 1, "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"),
        ("looped-bfs", 1, "F1.0 F1.1 F1.2 F1.3 F3.0 F3.1 F3.2 F3.3 B3.3 B3.2 B3.1 B3.0 B1.3 B1.2 B1.1 B1.0"),
        # Figure 4 of arXiv:2104.04473, for two ranks: rounds of two micro-batches.
        ("interleaved-1f1b", 0, "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"),
        ("interleaved-1f1b", 1, "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"),
        # The paper's ZB-H1 with stages that interleave: rank 1 leaves its second halves one behind.
        (
            "interleaved-zero-bubble",
            0,
            "F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 F0.2 I2.1 W2.1 F0.3 I0.0 W0.0 F2.2 I0.1 W0.1 F2.3 I2.2 W2.2 I2.3 W2.3 "
            "I0.2 W0.2 I0.3 W0.3",
        ),
        (
            "interleaved-zero-bubble",
            1,
            "F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 F1.2 I1.0 W3.1 F1.3 I1.1 W1.0 F3.2 I3.2 W1.1 F3.3 I3.3 W3.2 I1.2 W3.3 "
            "I1.3 W1.2 W1.3",
        ),
        # Figure 5 of arXiv:2401.10241, for two ranks.
        (
            "zbv-zero-bubble",
            0,
            "F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 I3.3 W3.3 "
            "I0.2 W0.2 I0.3 W0.3",
        ),
        (
            "zbv-zero-bubble",
            1,
            "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 F1.3 I1.1 W1.1 F2.3 I2.2 W2.2 I1.2 I2.3 "
            "I1.3 W1.2 W2.3 W1.3",
        ),
    ],
)
def test_order_of_a_schedule(schedule: str, rank: int, expected: str) -> None:
    assert spelled(pipeline.order(pipelined(schedule), rank=rank)) == expected
    assert not pipeline.violations(actions(expected), pipelined(schedule), rank=rank)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2", "0 times"),
        ("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3 B0.3", "too often"),
        ("F0.0 F0.1 B0.0 F0.2 B0.1 B0.3 F0.3 B0.2", "before"),
        ("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3 F1.0", "too often"),
    ],
)
def test_an_invalid_order_is_named(wrong: str, what: str) -> None:
    (violation,) = pipeline.violations(actions(wrong), pipelined("1f1b"), rank=0)
    assert what in violation


def test_ranks_layers_and_groups_of_stages() -> None:
    two, four = pipelined("1f1b"), pipelined("looped-bfs")
    assert (pipeline.owners(two), pipeline.owners(four), pipeline.owners(pipelined("zbv-zero-bubble"))) == (
        [0, 1],
        [0, 1, 0, 1],
        [0, 1, 1, 0],
    )
    assert [pipeline.layers_of(stage, two) for stage in range(2)] == [[0, 1], [2, 3, 4]]
    assert [pipeline.layers_of(stage, four) for stage in range(4)] == [[0], [1], [2], [3, 4]]
    assert pipeline.groups_of(0, two) == ["tok_embeddings", "layers.0", "layers.1"]
    assert pipeline.groups_of(1, two) == ["layers.2", "layers.3", "layers.4", "output"]


def test_entries_of_a_rank() -> None:
    first, last = ["tok_embeddings.weight"], ["module_input/layers.2.attention.wq", "norm.weight", "logits"]
    entries = dict.fromkeys([*first, *last, "rope_table"], 1)
    assert list(pipeline.held_by(0, entries, pipelined("1f1b"))) == [*first, "rope_table"]
    assert list(pipeline.held_by(1, entries, pipelined("1f1b"))) == [*last, "rope_table"]
    assert pipeline.held_by(0, entries, Cell(model="cut").config) == entries


def test_transfers_cross_ranks_only() -> None:
    one, back = pipelined("1f1b"), pipelined("zbv-zero-bubble")
    assert pipeline.transfers(actions("F0.0 B0.0"), one) == Counter({("send", 1): 1, ("recv", 1): 1})
    # The bend of the V is on one rank.
    assert pipeline.transfers(actions("F1.0 F2.0 I2.0 W2.0 I1.0"), back) == Counter({("recv", 0): 2, ("send", 0): 2})


def test_activations_are_held_until_the_whole_backward() -> None:
    assert pipeline.held(actions("F0.0 F0.1 B0.0"), 0, pipelined("1f1b")) == [1]
    assert pipeline.held(actions("F0.0 F0.1 I0.0"), 0, pipelined("zbv-zero-bubble")) == [0, 1]
    assert pipeline.held(actions("F0.0 F0.1 I0.0 W0.0"), 0, pipelined("zbv-zero-bubble")) == [1]
    assert [pipeline.most_held(pipelined("1f1b"), rank=rank) for rank in range(2)] == [2, 1]
    assert pipeline.most_held(pipelined("gpipe"), rank=1) == 4


def test_gathers_by_reshard_mode() -> None:
    done = pipeline.order(pipelined("gpipe"), rank=0)
    assert pipeline.gathers(done, pipelined("gpipe")) == Counter(["tok_embeddings", "layers.0", "layers.1"])
    always = pipeline.gathers(done, pipelined("gpipe", reshard="always"))
    assert always == Counter({"tok_embeddings": 5, "layers.0": 5, "layers.1": 5})  # backward frees nothing


def test_collectives_in_the_order_of_actions() -> None:
    """Backward gathers from the last group on, and groups are reduced once, from the first."""
    always = pipelined("gpipe", reshard="always")
    numels = {"tok_embeddings": 3, "layers.0": 5, "layers.1": 7}
    dims = resolve_mesh(always.mesh, world_size=4)
    events = pipeline.fsdp_events(always, dims, numels, pipeline.order(always, rank=0))
    gathered = [event.numel for event in events if event.kind == "all_gather"]
    assert gathered == [3, 5, 7] * 4 + [7, 5, 3]
    assert [(event.kind, event.numel) for event in events[-3:]] == [("reduce_scatter", n) for n in (6, 10, 14)]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_a_rank_with_two_stages_gathers_ahead(schedule: str) -> None:
    """Both stages are gathered before the first action, and reduced each after its own last backward."""
    default, always = (pipelined(schedule, reshard=reshard) for reshard in ("default", "always"))
    ahead = [("gather", group, "data") for group in ("tok_embeddings", "layers.0", "layers.2")]
    reduced = [("reduce", group, "backward") for group in ("layers.2", "tok_embeddings", "layers.0")]
    assert not list(pipeline.group_steps(pipeline.order(default, rank=0), default))[3:-3]
    steps = list(pipeline.group_steps(pipeline.order(always, rank=0), always))
    assert steps[:3] == ahead
    assert [step for step in steps if step.kind == "reduce"] == reduced
    # Each of three forwards more, and one backward: the other forwards find what was gathered ahead.
    assert Counter(step.group for step in steps if step.kind == "gather" and step.phase != "data") == Counter(
        {"tok_embeddings": 4, "layers.0": 4, "layers.2": 4}
    )


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"])
@pytest.mark.parametrize(("pp", "accumulation"), [(2, 2), (2, 6), (4, 4), (4, 8), (8, 8), (8, 24)])
def test_orders_of_any_size_are_valid(schedule: str, pp: int, accumulation: int) -> None:
    sized = replace(pipelined(schedule), mesh=replace(pipelined(schedule).mesh, pp=pp), accumulation=accumulation)
    assert not [
        wrong for rank in range(pp) for wrong in pipeline.violations(pipeline.order(sized, rank=rank), sized, rank=rank)
    ]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # The first halves of rank 1 are one ahead of the second halves, which find two gradients each.
        ("interleaved-zero-bubble", [[1, 1, 1, 1], [2, 2], [1, 1, 1, 1], [2, 2]]),
        ("zbv-zero-bubble", [[1, 1, 1, 1], [1, 1, 2], [1, 1, 1, 1], [1, 1, 1, 1]]),
        ("interleaved-1f1b", [[1, 1, 1, 1]] * 4),
    ],
)
def test_gradients_that_second_halves_add_up(schedule: str, expected: list[list[int]]) -> None:
    names = [f"layers.{layer}.attention_norm.weight" for layer in range(4)]
    assert [pipeline.added_up_at_once(name, pipelined(schedule)) for name in names] == expected


@pytest.mark.parametrize(
    ("schedule", "received", "kept"),
    [
        ("1f1b", [4, 4], [0, 0]),
        ("interleaved-1f1b", [12, 12], None),
        ("interleaved-zero-bubble", None, [4, 8]),
        ("zbv-zero-bubble", [8, 16], [4, 4]),
    ],
)
def test_activations_received_and_gradients_kept(
    schedule: str, received: list[int] | None, kept: list[int] | None
) -> None:
    """In activations of a micro-batch, of which there are 4.

    The ends of a pipeline receive from one neighbour, a rank with two stages for both. Until the next step each stage
    keeps gradients of its input, except the first stage and the upper one at the bend of the V.
    """
    by_schedule = pipelined(schedule)
    dims = resolve_mesh(by_schedule.mesh, world_size=4)
    for count, expected in ((pipeline.received_numel, received), (pipeline.kept_gradients_numel, kept)):
        if expected is not None:
            numels = [number * pipeline.activation_numel(by_schedule, dims) for number in expected]
            assert [count(by_schedule, dims, rank=rank) for rank in range(2)] == numels


# Traffic


# 2 samples of 4 tokens a rank: activations of 8 x 4 = 32 elements.
SMALL = TrainerConfig(
    model=ModelConfig(vocab_size=3, dim=4, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=6, max_seq_len=4),
    mesh=MeshConfig(dp_shard=2, tp=2),
    data=DataConfig(seq_len=4, global_batch_size=4),
)


def but(**changes: Any) -> TrainerConfig:
    return replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Backward: output and its norm's weight, feed-forward, attention and their norms' weights, embedding.
        (SMALL, "F B S32 R4 G16 S32 G16 S32 R4 R4 G16"),
        (but(sequence_parallel=False), "forward: R32 R32 R32 G16 B R32 R32 R32"),
        (but(loss_parallel=True), "forward: S32 G16 S32 G16 S32 G16 R8 R8 R8 B S32 R4 G16 S32 G16 S32 R4 R4 G16"),
        (but(activation_checkpointing="full"), "F B S32 R4 G16 G16 S32 G16 S32 G16 S32 R4 R4 G16"),
        (
            but(activation_checkpointing="full", compile="inductor"),
            "F B S32 R4 G16 S32 G16 S32 G16 S32 G16 S32 R4 R4 G16",
        ),
        (
            but(sequence_parallel=False, activation_checkpointing="selective"),
            "forward: R32 R32 R32 G16 B R32 R32 R32 R32",
        ),
        (
            but(activation_checkpointing="selective", model=replace(SMALL.model, dropout=0.1)),
            "F B S32 R4 G16 S32 G16 S32 G16 S32 G16 S32 R4 R4 G16",
        ),
        (
            but(accumulation=2, gradient_sync="last"),
            "forward: S16 G8 S16 G8 S16 G8 G8 B S16 G8 S16 G8 S16 G8 "
            "forward: S16 G8 S16 G8 S16 G8 G8 B S16 R4 G8 S16 G8 S16 R4 R4 G8",
        ),
    ],
)
def test_tensor_parallel_collectives(config: TrainerConfig, expected: str) -> None:
    """F stands for embedding, attention, feed-forward, output, and logits padded to 2 of 3 tokens a rank."""
    events = list(tensor_parallel_events(config, resolve_mesh(config.mesh, world_size=4)))
    assert {event.group for event in events} == {"tp"}
    written_out = expected.replace("F", "forward: S32 G16 S32 G16 S32 G16 G16").replace("B", "backward:")
    assert words(events, lambda event: event.numel) == written_out


@pytest.mark.parametrize(
    ("sync", "dtypes"), [("each", {"bfloat16"}), ("last", {"float32"})], ids=["each", "accumulated in fp32"]
)
def test_gradients_of_norms_are_reduced_in_their_own_dtype(sync: str, dtypes: set[str]) -> None:
    config = but(precision="bf16-mp", accumulation=2, gradient_sync=sync)
    events = tensor_parallel_events(config, resolve_mesh(config.mesh, world_size=4))
    assert {event.dtype for event in events if event.numel == 4} == dtypes


def test_shapes_of_uneven_shards_and_sharded_dimensions() -> None:
    """Biases are sharded like the output that they are added to."""
    first, last = (local_shapes(SMALL.model, tp=2, tp_rank=rank) for rank in (0, 1))
    assert first["tok_embeddings.weight"] == first["layers.0.attention.wq.weight"] == (2, 4)
    assert last["tok_embeddings.weight"] == last["output.weight"] == (1, 4)
    assert (first["layers.0.feed_forward.w2.weight"], first["norm.weight"]) == ((4, 3), (4,))
    assert sharded_dim("layers.0.attention.wq.bias") == 0
    assert sharded_dim("layers.0.attention.wo.bias") is None
    with pytest.raises(ValueError, match=r"layers.0.gate.weight.*plan"):
        sharded_dim("layers.0.gate.weight")


def test_traffic_of_a_step_computed_manually() -> None:
    # Shards of rows: embedding 1 x 4; block: norms 2 + 2, wq wk wv wo 4 each, w1 w3 of 3 rows 2 x 4, w2 2 x 3;
    # norm and output 2 + 4. tp rank 1 has one row of embedding and output, padded to the same.
    block = 4 + 4 * 4 + 2 * 8 + 6
    for tp_rank in (0, 1):
        traffic = add_up(step_events(SMALL, resolve_mesh(SMALL.mesh, world_size=4), tp_rank=tp_rank))
        assert traffic == {
            ("data", "dp_shard", "all_reduce", "int64"): Traffic(1, 8),
            ("forward", "dp_shard", "all_gather", "float32"): Traffic(3, 4 * (4 + block + 6)),
            ("forward", "tp", "all_gather", "float32"): Traffic(4, 4 * (3 * 16 + 16)),
            ("forward", "tp", "reduce_scatter", "float32"): Traffic(3, 4 * 3 * 32),
            ("backward", "dp_shard", "all_gather", "float32"): Traffic(2, 4 * (4 + block)),
            ("backward", "dp_shard", "reduce_scatter", "float32"): Traffic(3, 4 * 2 * (4 + block + 6)),
            ("backward", "tp", "all_gather", "float32"): Traffic(3, 4 * 3 * 16),
            ("backward", "tp", "reduce_scatter", "float32"): Traffic(3, 4 * 3 * 32),
            ("backward", "tp", "all_reduce", "float32"): Traffic(3, 4 * 3 * 4),
            ("clip", "dp_shard", "all_reduce", "float32"): Traffic(1, 4 * 12),
            ("clip", "tp", "all_reduce", "float32"): Traffic(1, 4 * 12),
            ("idle", "dp_shard", "all_reduce", "float32"): Traffic(1, 4),
        }


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("all_gather", [8, 8, 8]),  # three inputs of others, as they are
        ("reduce_scatter", [2, 2, 2]),  # three partial sums of a quarter
        ("all_reduce", [2, 2, 2, 2, 2, 2]),  # first the sums, then the quarters that are complete
        ("all_to_all", [2, 2, 2]),  # a quarter for each of the others
    ],
)
def test_bytes_that_each_of_four_ranks_sends(kind: str, messages: list[int]) -> None:
    assert sent_bytes(kind, 8, ranks=4) == sum(messages)
    assert sent_bytes(kind, 8, ranks=1) == 0
    with pytest.raises(ValueError, match="collective broadcast: only all_gather, reduce_scatter"):
        sent_bytes("broadcast", 8, ranks=4)


@pytest.mark.parametrize(("group", "ranks"), [("dp_shard", 4), ("tp", 8), ("dp_shard/2", 2), ("world", 96)])
def test_ranks_of_a_group(group: str, ranks: int) -> None:
    assert ranks_in(group, ParallelDims(dp_replicate=3, dp_shard=4, tp=8)) == ranks


def test_norms_are_reduced_in_the_largest_dtype_of_their_mesh_if_there_is_one() -> None:
    names, dims = ["output.weight", "norm.weight"], resolve_mesh(SMALL.mesh, world_size=4)
    assert {event.dtype for event in clip_events(names, but(precision="bf16-mixed"), dims)} == {"float32"}
    apart = clip_events(names, but(precision="bf16-mixed", sequence_parallel=False, norms_in_tp=False), dims)
    expected = [("dp_shard", "bfloat16"), ("tp", "bfloat16"), ("dp_shard", "float32")]
    assert [(event.group, event.dtype) for event in apart] == expected
    alone = but(mesh=MeshConfig(dp_shard=1))
    assert step_events(alone, resolve_mesh(alone.mesh, world_size=1), tp_rank=0) == []


# Versions of torch, which have the traits of the releases around them


@pytest.mark.parametrize(
    ("torch_version", "traits", "reduce_dtype"),
    [
        ("2.6.0", UP_TO_2_8, "bfloat16"),
        ("2.8.0+cu126", UP_TO_2_8, "bfloat16"),
        ("2.9.1", UP_TO_2_9, "bfloat16"),
        ("2.10.0", UP_TO_2_11, "bfloat16"),
        ("2.12.1", UP_TO_2_12, "bfloat16"),
        ("2.13.0+cpu", UP_TO_2_14, "bfloat16"),
        ("2.14.0", UP_TO_2_14, "bfloat16"),
        ("2.15.0.dev20261122", FROM_2_15, "float32"),
        ("2.15.0a0+gitc0ffee", FROM_2_15, "float32"),
        ("3.0", FROM_2_15, "float32"),
    ],
)
def test_traits_by_version(torch_version: str, traits: VersionTraits, reduce_dtype: str) -> None:
    assert traits_of(torch_version) == traits
    assert unset_reduce_dtype(torch_version) == reduce_dtype
    with pytest.raises(ValueError, match="Invalid version: 'main'"):
        traits_of("main")
