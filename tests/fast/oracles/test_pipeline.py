"""Pipeline model on known cases: the orders of the papers, and their consequences."""

from collections import Counter

import pytest
from msgspec.structs import replace

from conformance.oracles.pipeline import (
    Action,
    activation_numel,
    added_up_at_once,
    fsdp_events,
    gathers,
    group_steps,
    groups_of,
    held,
    held_by,
    kept_gradients_numel,
    layers_of,
    most_held,
    order,
    owners,
    received_numel,
    transfers,
    violations,
)
from conformance.plan.cells import Cell
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import resolve_mesh

PLAIN = Cell(mesh="pp2-dp2", model="cut", accumulation=4)
LETTERS = {"forward": "F", "backward": "B", "backward-input": "I", "backward-weight": "W"}


def config(schedule: str, *, reshard: str = "default") -> TrainerConfig:
    return PLAIN.but(pipeline=schedule, reshard=reshard).config


def actions(text: str) -> list[Action]:
    """Return the actions that `F0.1 B0.1` spells: kind, stage and micro-batch."""
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [Action(kinds[word[0]], *map(int, word[1:].split("."))) for word in text.split()]


def spelled(order: list[Action]) -> str:
    return " ".join(f"{LETTERS[kind]}{stage}.{index}" for kind, stage, index in order)


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
    assert spelled(order(config(schedule), rank=rank)) == expected
    assert not violations(actions(expected), config(schedule), rank=rank)


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
    (violation,) = violations(actions(wrong), config("1f1b"), rank=0)
    assert what in violation


def test_ranks_layers_and_groups_of_stages() -> None:
    two, four = config("1f1b"), config("looped-bfs")
    assert (owners(two), owners(four), owners(config("zbv-zero-bubble"))) == ([0, 1], [0, 1, 0, 1], [0, 1, 1, 0])
    assert [layers_of(stage, two) for stage in range(2)] == [[0, 1], [2, 3, 4]]
    assert [layers_of(stage, four) for stage in range(4)] == [[0], [1], [2], [3, 4]]
    assert groups_of(0, two) == ["tok_embeddings", "layers.0", "layers.1"]
    assert groups_of(1, two) == ["layers.2", "layers.3", "layers.4", "output"]


def test_entries_of_a_rank() -> None:
    first, last = ["tok_embeddings.weight"], ["module_input/layers.2.attention.wq", "norm.weight", "logits"]
    entries = dict.fromkeys([*first, *last, "rope_table"], 1)
    assert list(held_by(0, entries, config("1f1b"))) == [*first, "rope_table"]
    assert list(held_by(1, entries, config("1f1b"))) == [*last, "rope_table"]
    assert held_by(0, entries, Cell(model="cut").config) == entries


def test_transfers_cross_ranks_only() -> None:
    one, back = config("1f1b"), config("zbv-zero-bubble")
    assert transfers(actions("F0.0 B0.0"), one) == Counter({("send", 1): 1, ("recv", 1): 1})
    # The bend of the V is on one rank.
    assert transfers(actions("F1.0 F2.0 I2.0 W2.0 I1.0"), back) == Counter({("recv", 0): 2, ("send", 0): 2})


def test_activations_are_held_until_the_whole_backward() -> None:
    assert held(actions("F0.0 F0.1 B0.0"), 0, config("1f1b")) == [1]
    assert held(actions("F0.0 F0.1 I0.0"), 0, config("zbv-zero-bubble")) == [0, 1]
    assert held(actions("F0.0 F0.1 I0.0 W0.0"), 0, config("zbv-zero-bubble")) == [1]
    assert [most_held(config("1f1b"), rank=rank) for rank in range(2)] == [2, 1]
    assert most_held(config("gpipe"), rank=1) == 4


def test_gathers_by_reshard_mode() -> None:
    done = order(config("gpipe"), rank=0)
    assert gathers(done, config("gpipe")) == Counter(["tok_embeddings", "layers.0", "layers.1"])
    always = gathers(done, config("gpipe", reshard="always"))
    assert always == Counter({"tok_embeddings": 5, "layers.0": 5, "layers.1": 5})  # backward frees nothing


def test_collectives_in_the_order_of_actions() -> None:
    """Backward gathers from the last group on, and groups are reduced once, from the first."""
    always = config("gpipe", reshard="always")
    numels = {"tok_embeddings": 3, "layers.0": 5, "layers.1": 7}
    dims = resolve_mesh(always.mesh, world_size=4)
    events = fsdp_events(always, dims, numels, order(always, rank=0))
    gathered = [event.numel for event in events if event.kind == "all_gather"]
    assert gathered == [3, 5, 7] * 4 + [7, 5, 3]
    assert [(event.kind, event.numel) for event in events[-3:]] == [("reduce_scatter", n) for n in (6, 10, 14)]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
def test_a_rank_with_two_stages_gathers_ahead(schedule: str) -> None:
    """Both stages are gathered before the first action, and reduced each after its own last backward."""
    default, always = (config(schedule, reshard=reshard) for reshard in ("default", "always"))
    ahead = [("gather", group, "data") for group in ("tok_embeddings", "layers.0", "layers.2")]
    reduced = [("reduce", group, "backward") for group in ("layers.2", "tok_embeddings", "layers.0")]
    assert not list(group_steps(order(default, rank=0), default))[3:-3]
    steps = list(group_steps(order(always, rank=0), always))
    assert steps[:3] == ahead
    assert [step for step in steps if step.kind == "reduce"] == reduced
    # Each of three forwards more, and one backward: the other forwards find what was gathered ahead.
    assert Counter(step.group for step in steps if step.kind == "gather" and step.phase != "data") == Counter(
        {"tok_embeddings": 4, "layers.0": 4, "layers.2": 4}
    )


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"])
@pytest.mark.parametrize(("pp", "accumulation"), [(2, 2), (2, 6), (4, 4), (4, 8), (8, 8), (8, 24)])
def test_orders_of_any_size_are_valid(schedule: str, pp: int, accumulation: int) -> None:
    sized = replace(config(schedule), mesh=replace(config(schedule).mesh, pp=pp), accumulation=accumulation)
    assert not [wrong for rank in range(pp) for wrong in violations(order(sized, rank=rank), sized, rank=rank)]


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
    assert [added_up_at_once(name, config(schedule)) for name in names] == expected


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
    by_schedule = config(schedule)
    dims = resolve_mesh(by_schedule.mesh, world_size=4)
    for count, expected in ((received_numel, received), (kept_gradients_numel, kept)):
        if expected is not None:
            numels = [number * activation_numel(by_schedule, dims) for number in expected]
            assert [count(by_schedule, dims, rank=rank) for rank in range(2)] == numels
