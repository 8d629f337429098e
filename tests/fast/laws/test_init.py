"""INIT-5 and INIT-8, which no fault of the product can violate, on made-up facts."""

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.experiments.build import SampledShards
from conformance.laws.state.test_init import test_poison_is_seen_in_every_tensor as init_5
from conformance.laws.state.test_init import test_torch_nn_init_samples_each_shard_independently as init_8
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell

CELL = Cell(mesh="dp2")


def run(noticed: dict[str, int]) -> Any:
    facts = SimpleNamespace(rank=0, poisoned={"w": 4, "rope_table": 2}, noticed_poison=noticed)
    return lambda _cell: SimpleNamespace(ranks=[facts])


def test_a_control_that_sees_everything_passes() -> None:
    init_5(run({"w": 4, "rope_table": 2}), CELL)


@pytest.mark.parametrize("noticed", [{"w": 4}, {"w": 4, "rope_table": 0}, {"w": 3, "rope_table": 2}, {}])
def test_a_control_that_overlooks_something_fails(noticed: dict[str, int]) -> None:
    with pytest.raises(ConformanceFailure, match="poison goes unseen"):
        init_5(run(noticed), CELL)


def measure(*ranks: tuple[str, str]) -> Any:
    """Return the fixture `measure` for ranks with these layouts and digests of a shard."""
    return lambda _experiment, _cell: [SampledShards({"w": shard}, {"w": layout}) for layout, shard in ranks]


def test_different_shards_and_equal_copies_pass() -> None:
    init_8(measure(("first", "a"), ("second", "b"), ("first", "a"), ("second", "b")), CELL)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([("first", "a"), ("second", "a")], "different shards: measured 1, expected 2"),
        ([("full", "a"), ("full", "b")], "different samples: measured 2, expected 1"),
    ],
    ids=["shards alike", "replicas differ"],
)
def test_samples_from_one_state_or_from_many_fail(ranks: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConformanceFailure, match=message):
        init_8(measure(*ranks), CELL)
