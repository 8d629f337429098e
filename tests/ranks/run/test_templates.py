"""Templates: processes that make a call once, and of which ranks are forks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conformance.run.failures import RunFailed
from conformance.run.pool import Pools, Task, Template

TASKS = "tests.support.pool_tasks"
DEADLINE_S = 20.0


@pytest.fixture
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


def template_of(argument: object) -> Template:
    return Template(f"{TASKS}:note_call", str(argument), {"SOME_SWITCH": "on"})


def found(pools: Pools, template: Template | None, *, kind: str, world_size: int = 2) -> list[dict[str, Any]]:
    task = Task(f"{TASKS}:found_call", {}, kind=kind, template=template)
    return pools.run(task, world_size=world_size, deadline_s=DEADLINE_S)


def misbehave(pools: Pools, template: Template, how: str, *, deadline_s: float = DEADLINE_S) -> RunFailed:
    task = Task(f"{TASKS}:misbehave", {"rank": 1, "how": how}, kind="a", template=template)
    with pytest.raises(RunFailed) as caught:
        pools.run(task, world_size=2, deadline_s=deadline_s)
    return caught.value


def test_all_worlds_find_what_one_call_has_left(pools: Pools, tmp_path: Path) -> None:
    template = template_of(tmp_path / "calls")
    pools.prepare(template)
    ranks = [*found(pools, template, kind="a"), *found(pools, template, kind="b", world_size=4)]
    ((caller, switch),) = (line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert switch == "on"
    assert {rank["parent"] for rank in ranks} == {int(caller)}
    assert len({rank["pid"] for rank in ranks}) == 6
    assert all(rank["called"] == [template.argument] for rank in ranks)
    assert all(rank["home"] == os.getcwd() for rank in ranks), "the call has changed the working directory"


def test_others_find_nothing(pools: Pools, tmp_path: Path) -> None:
    one, other = template_of(tmp_path / "one"), template_of(tmp_path / "other")
    ranks = [found(pools, given, kind=kind)[0] for kind, given in (("a", one), ("b", other), ("c", None))]
    assert [rank["called"] for rank in ranks] == [[one.argument], [other.argument], []]
    assert len({rank["parent"] for rank in ranks}) == 3


@pytest.mark.parametrize(
    ("how", "kind", "code"), [("raise", "raised", None), ("segfault", "crash", -11)], ids=["raises", "dies"]
)
def test_ranks_that_fail_are_replaced(pools: Pools, tmp_path: Path, how: str, kind: str, code: int | None) -> None:
    template = template_of(tmp_path / "calls")
    before = found(pools, template, kind="a")
    failed = misbehave(pools, template, how)
    assert (failed.kind, failed.ranks[1].exit_code) == (kind, code)
    after = found(pools, template, kind="a")
    assert {rank["pid"] for rank in before}.isdisjoint(rank["pid"] for rank in after)
    assert not any(psutil.pid_exists(rank["pid"]) for rank in before)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "the template is still there"


def test_ranks_that_hang_are_ended(pools: Pools, tmp_path: Path) -> None:
    template = template_of(tmp_path / "calls")
    before = found(pools, template, kind="a")
    failed = misbehave(pools, template, "sleep", deadline_s=1.0)
    assert failed.kind == "timeout"
    assert "in sleep" in failed.ranks[1].stack
    assert not any(psutil.pid_exists(rank["pid"]) for rank in before)


def test_a_call_that_fails_leaves_ranks_to_the_server(pools: Pools) -> None:
    ranks = found(pools, template_of("raise"), kind="a")
    assert [rank["called"] for rank in ranks] == [[], []]
    assert [rank["called"] for rank in found(pools, template_of("raise"), kind="b")] == [[], []]


def test_a_template_that_dies_takes_its_ranks_along(pools: Pools, tmp_path: Path) -> None:
    template = template_of(tmp_path / "calls")
    (rank, _) = found(pools, template, kind="a")
    psutil.Process(rank["parent"]).kill()
    psutil.wait_procs([psutil.Process(rank["parent"])], timeout=5)
    after = found(pools, template, kind="a")
    assert [each["called"] for each in after] == [[], []]
    assert not psutil.pid_exists(rank["pid"]) or psutil.Process(rank["pid"]).status() == psutil.STATUS_ZOMBIE


def test_all_end_with_the_pools(tmp_path: Path) -> None:
    with Pools() as pools:
        ranks = found(pools, template_of(tmp_path / "calls"), kind="a")
    assert not any(psutil.pid_exists(pid) for rank in ranks for pid in (rank["pid"], rank["parent"]))
