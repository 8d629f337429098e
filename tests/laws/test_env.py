"""The preconditions can fail: each ENV law on facts of a healthy world, and on the same facts with one thing wrong."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from conformance.laws import test_environment as laws
from conformance.plan.cells import Cell
from conformance.run.pool import Pools, Task

Facts = list[dict[str, Any]]
COLLECTIVES = laws.test_collectives_are_correct_for_every_dtype
SOFTWARE = laws.test_ranks_run_the_same_software_in_the_same_state
MACHINE = laws.test_machine_has_memory_and_one_clock


@pytest.fixture(scope="module")
def healthy(pools: Pools) -> Facts:
    return pools.run(Task("conformance.experiments.build:probe", {"defect": None}), world_size=2, deadline_s=60)


def double(facts: Facts, dtype: str, collective: str) -> None:
    facts[1]["collectives"][dtype][collective] = [2 * x for x in facts[1]["collectives"][dtype][collective]]


@pytest.mark.parametrize("law", [COLLECTIVES, SOFTWARE, MACHINE])
def test_a_healthy_world_passes(healthy: Facts, law: Callable[..., None]) -> None:
    law(lambda _world: healthy, Cell())


@pytest.mark.parametrize(
    ("law", "harm", "message"),
    [
        (COLLECTIVES, lambda facts: double(facts, "bfloat16", "all_reduce"), "rank 1, bfloat16"),
        (COLLECTIVES, lambda facts: double(facts, "int64", "broadcast"), "rank 1, int64"),
        (SOFTWARE, lambda facts: facts[1].update(torch="2.0"), "torch differs between ranks"),
        (SOFTWARE, lambda facts: facts[1].update(threads=7), "threads differs between ranks"),
        (SOFTWARE, lambda facts: facts[1].update(pid=facts[0]["pid"]), "processes: measured 1, expected 2"),
        (MACHINE, lambda facts: facts[1].update(available_memory_bytes=5), "5 bytes of memory available"),
        (MACHINE, lambda facts: facts[1].update(monotonic_s=facts[0]["monotonic_s"] + 60), "60.0 s apart"),
    ],
)
def test_a_precondition_fails(
    healthy: Facts, law: Callable[..., None], harm: Callable[[Facts], None], message: str
) -> None:
    facts = copy.deepcopy(healthy)
    harm(facts)
    with pytest.raises(AssertionError, match=message):
        law(lambda _world: facts, Cell())
