"""Pool of warm ranks, with real processes: results, and the errors when ranks misbehave."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from conformance.plan.cells import cell_from_id
from conformance.run import pool
from conformance.run.experiment import job_of, json_like
from conformance.run.pool import Pools, RankReport, RunFailed, Task
from conformance.run.ranks import client
from tests.support import warm_servers

TASKS = "tests.support.pool_tasks"
DEADLINE_S = 20.0
VERDICT_LIMIT_S = 10.0
"""More than a verdict takes on a busy machine, and half of the deadline, which failures of ranks must not wait for."""

OWNER = """
import sys, threading, time
sys.path[:0] = {path!r}
from conformance.run.pool import Pools, Task
pools = Pools()
ranks = [rank for world_size in (1, 2) for rank in
         pools.run(Task(function="{tasks}:identity", payload={{}}), world_size=world_size, deadline_s=20)]
server = pools.run(Task(function="{tasks}:surroundings", payload={{"names": []}}), world_size=1, deadline_s=20)
print(*[rank["pid"] for rank in ranks], server[0]["server"], flush=True)
payload = {{"rank": 1, "how": "sleep_with_interpreter_lock"}}
pools.run(Task(function="{tasks}:misbehave", payload=payload), world_size=2, deadline_s=60)
"""


@pytest.fixture(scope="module", autouse=True)
def started_servers() -> Iterator[None]:
    """Start rank servers, as sessions do, instead of forking them."""
    with patch.object(client, "subprocess", subprocess):
        yield


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    warm_servers.address()  # starts a process, which stays
    before = psutil.Process().children(recursive=True)
    with Pools() as pools:
        yield pools
    assert set(psutil.Process().children(recursive=True)) <= set(before)


@pytest.fixture(scope="module")
def other_pools() -> Iterator[Pools]:
    """Return pools for tests that end idle ranks or the server, on a machine that seems to have devices."""
    with pytest.MonkeyPatch.context() as patch, Pools() as pools:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        yield pools


def run(pools: Pools, function: str, *, world_size: int = 2, **payload: Any) -> list[Any]:
    return pools.run(_task(function, **payload), world_size=world_size, deadline_s=DEADLINE_S)


def run_reports(pools: Pools, how: str) -> tuple[RankReport, ...]:
    return pools.run_reports(_task("misbehave", rank=1, how=how), world_size=2, deadline_s=DEADLINE_S)


def fail(
    pools: Pools, function: str, *, world_size: int = 2, deadline_s: float = DEADLINE_S, **payload: Any
) -> RunFailed:
    """Run a task that must fail or last; the error must come in time, leave no process, and a new pool must work."""
    before = pids(pools, world_size=world_size)
    start_s = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        pools.run(_task(function, **payload), world_size=world_size, deadline_s=deadline_s)
    assert time.monotonic() - start_s < VERDICT_LIMIT_S
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert set(pids(pools, world_size=world_size)).isdisjoint(before)
    assert sleepers() == []
    return caught.value


def pids(pools: Pools, *, world_size: int) -> list[int]:
    return [rank["pid"] for rank in run(pools, "identity", world_size=world_size)]


def sleepers() -> list[psutil.Process]:
    """Return the processes that tasks leave behind, of any parent."""
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if process.name() == "sleep"]


def _task(function: str, **payload: Any) -> Task:
    return Task(function=f"{TASKS}:{function}", payload=payload)


# Tasks that end well


@pytest.mark.parametrize("world_size", [1, 8])
def test_all_ranks_return(pools: Pools, world_size: int) -> None:
    results = run(pools, "identity", world_size=world_size, text="a", numbers=[1, 2.5, None])
    assert [(result["rank"], result["world_size"]) for result in results] == [
        (r, world_size) for r in range(world_size)
    ]
    assert all(result["payload"] == {"text": "a", "numbers": [1, 2.5, None]} for result in results)


def test_surroundings_of_a_rank(pools: Pools) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    rank = run(pools, "surroundings", names=names)[1]
    assert list(rank["env"].values()) == ["1", "1", "2", "2", os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "1"]
    assert rank["torch_threads"] == 1, "numerics must not depend on the number of processors"
    assert rank["server_threads"] == 1, "forking a process with several threads is not safe"
    assert not rank["has_pytest"]
    assert not rank["has_cuda_context"]
    assert DEADLINE_S - 5 < rank["timeout_s"] <= DEADLINE_S


def test_forked_servers_are_those_that_are_started(pools: Pools) -> None:
    """Other tests fork rank servers, see `warm_servers`."""
    names = [name for name in client._server_environment() if name != "PYTEST_CURRENT_TEST"]

    def found(pools: Pools) -> dict[str, Any]:
        rank: dict[str, Any] = run(pools, "surroundings", names=names)[1]
        assert psutil.Process(rank.pop("server")).cwd() == str(Path.cwd())
        return {name: value for name, value in rank.items() if name != "timeout_s"}

    with warm_servers.used(), Pools() as forked:
        forked.prepare()
        assert forked._server is not None
        assert isinstance(forked._server._process, warm_servers.ForkedProcess)
        assert found(forked) == found(pools)
        ends = [*pids(forked, world_size=2), run(forked, "surroundings", names=[])[0]["server"]]
    wait_until_gone(ends)


def test_env_is_applied_and_restored(pools: Pools) -> None:
    before = pids(pools, world_size=2)
    task = _task("surroundings", names=["SOME_SWITCH", "HOME"])
    env = {"SOME_SWITCH": "on", "HOME": "/nowhere"}
    with_env = pools.run(task, world_size=2, deadline_s=DEADLINE_S, env=env)
    without = pools.run(task, world_size=2, deadline_s=DEADLINE_S)
    assert [rank["env"] for rank in with_env] == [env, env]
    assert [rank["env"] for rank in without] == [{"SOME_SWITCH": None, "HOME": os.environ.get("HOME")}] * 2
    assert pids(pools, world_size=2) == before


def test_variables_that_libraries_read_once_get_ranks_of_their_own(pools: Pools) -> None:
    def pid(device: str) -> int:
        env = {"CUDA_VISIBLE_DEVICES": device}
        process: int = pools.run(_task("identity"), world_size=1, deadline_s=DEADLINE_S, env=env)[0]["pid"]
        return process

    assert pid("0") == pid("0")
    assert pid("0") != pid("1")


def test_ranks_without_a_device_see_none(other_pools: Pools) -> None:
    """A rank that opened all devices of the machine would find other answers than on a machine without devices."""
    (rank,) = run(other_pools, "surroundings", world_size=1, names=["CUDA_VISIBLE_DEVICES"])
    assert rank["env"] == {"CUDA_VISIBLE_DEVICES": ""}


def test_process_state_is_reset_between_tasks(pools: Pools) -> None:
    assert run(pools, "change_process_state") == run(pools, "change_process_state")


def test_ranks_that_compile_find_the_compiler_imported(pools: Pools) -> None:
    for kind, compiles in (("plain", False), ("compiled", True)):
        task = Task(f"{TASKS}:compile_a_square", {}, kind=kind, compiles=compiles)
        values = pools.run(task, world_size=2, deadline_s=DEADLINE_S)
        assert values == [{"preloaded": compiles, "result": 9.0}] * 2


def test_infinities_survive(pools: Pools) -> None:
    not_a_number, infinite, negative_zero = run(pools, "return_infinities")[0]
    assert math.isnan(not_a_number)
    assert infinite == math.inf
    assert math.copysign(1, negative_zero) == -1


def test_report_bounds_the_output(pools: Pools) -> None:
    quiet, noisy = run_reports(pools, "print_much")
    assert quiet.output_tail == ""
    assert noisy.output_tail.endswith("the very end\n")
    assert len(noisy.output_tail) <= 4096
    assert run_reports(pools, "print_much")[0].output_tail == ""


def test_idle_ranks_are_limited_and_hand_their_memory_back(other_pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks end while the worker does nothing; the next task starts new ranks."""
    oldest, kept = pids(other_pools, world_size=8), pids(other_pools, world_size=6)
    run(other_pools, "identity", world_size=3)
    assert not any(psutil.pid_exists(pid) for pid in oldest)
    assert pids(other_pools, world_size=6) == kept
    other_pools.release()
    assert not any(psutil.pid_exists(pid) for pid in kept)
    idle = pids(other_pools, world_size=2)
    monkeypatch.setattr(pool, "IDLE_LIMIT_S", 0.1)
    wait_until_gone(idle)
    monkeypatch.undo()
    assert set(pids(other_pools, world_size=2)).isdisjoint(idle)


@pytest.mark.parametrize(
    ("how", "leaks"),
    [
        ("leave_children", ("child process",)),
        ("leave_thread", ("thread forgotten",)),
        ("leave_process_group", ("process group",)),
    ],
)
def test_a_leaking_pool_is_replaced(pools: Pools, how: str, leaks: tuple[str, ...]) -> None:
    before = pids(pools, world_size=2)
    reports = run_reports(pools, how)
    assert [report.value for report in reports] == ["done", "done"]
    assert [report.leaks for report in reports] == [(), leaks]
    assert sleepers() == []
    assert set(pids(pools, world_size=2)).isdisjoint(before)


def test_tasks_of_a_world_meet_again_and_again(pools: Pools) -> None:
    assert [run(pools, "group_twice", world_size=3) for _ in range(2)] == [[[3.0, 6.0]] * 3] * 2


def test_groups_of_earlier_tasks_leave_no_open_files(pools: Pools, tmp_path: Path) -> None:
    cell = cell_from_id("dp2-tp2-fp32-default-meta")
    trained = Task("benchmarks.warm_runs.steps:trained", json_like(job_of(cell, tmp_path, defect=None)))
    opened = []
    for _ in range(3):
        pools.run(trained, world_size=4, deadline_s=60.0)
        opened.append(run(pools, "open_files", world_size=4))
    assert opened[1:] == opened[:1] * 2


def test_a_rank_killed_while_idle_is_replaced(pools: Pools) -> None:
    before = pids(pools, world_size=2)
    os.kill(before[0], signal.SIGKILL)
    wait_until_gone(before[:1])
    assert set(pids(pools, world_size=2)).isdisjoint(before)


# Tasks that fail


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("interrupt", "raised", "rank 1 raised KeyboardInterrupt"),
        ("exit_0", "crash", "rank 1 exited with code 0 before finishing"),
        ("sys_exit", "crash", "rank 1 exited with code 0 before finishing"),
        ("die_with_children", "crash", "rank 1 exited with code 3 before finishing"),
        ("close_everything", "crash", "rank 1 exited with code 1 before finishing"),
        ("write_garbage", "crash", "rank 1 sent garbage instead of a report"),
    ],
)
def test_one_rank_fails(pools: Pools, how: str, kind: str, reason: str) -> None:
    failure = fail(pools, "misbehave", rank=1, how=how)
    assert (failure.kind, failure.first_rank, failure.reason) == (kind, 1, reason)
    assert [report.state for report in failure.ranks] == ["finished", "raised" if kind == "raised" else "died"]
    assert reason in failure.details()


def test_a_huge_error_is_bounded(pools: Pools) -> None:
    failure = fail(pools, "misbehave", rank=1, how="raise_huge")
    assert failure.reason.startswith("rank 1 raised ValueError: \\udc80xxx")
    assert len(failure.details()) < 50_000


@pytest.mark.parametrize(
    ("how", "kind", "reason", "shown"),
    [
        ("raise", "raised", "rank 1 raised ValueError: bad weights", "in raise_error"),
        ("segfault", "crash", "rank 1 was killed by SIGSEGV", "in segfault"),
    ],
)
def test_a_rank_fails_while_others_wait_for_it(pools: Pools, how: str, kind: str, reason: str, shown: str) -> None:
    failure = fail(pools, "misbehave_in_collective", world_size=4, rank=1, how=how)
    assert (failure.kind, failure.reason) == (kind, reason)
    for report in failure.ranks:
        assert f"--- rank {report.rank} " in failure.details()
        assert (shown if report.rank == 1 else "barrier") in report.traceback + report.stack
    if how == "raise":
        report = failure.ranks[1]
        assert (report.exception_type, Path(report.innermost_file).name) == ("ValueError", "pool_tasks.py")


def test_a_rank_killed_from_outside(pools: Pools) -> None:
    victim = pids(pools, world_size=4)[2]
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    failure = fail(pools, "misbehave_in_collective", world_size=4, rank=0, how="sleep")
    assert (failure.kind, failure.reason) == ("crash", "rank 2 was killed by SIGKILL")
    assert failure.ranks[2].exit_code == -signal.SIGKILL


def test_a_hung_rank_is_told_from_those_that_wait_for_it(pools: Pools) -> None:
    """Although the hung rank keeps the interpreter's lock; the deadline leaves time to meet on a busy machine."""
    how = "sleep_with_interpreter_lock"
    failure = fail(pools, "misbehave_in_collective", world_size=4, deadline_s=4.0, rank=2, how=how)
    assert (failure.kind, failure.first_rank) == ("timeout", 2)
    assert failure.reason == "no result from ranks 0, 1, 2, 3 within 4 s; rank 2 did not wait for a peer"
    assert "in sleep" in failure.ranks[2].stack
    assert all("barrier" in report.stack for report in failure.ranks if report.rank != 2)


def test_a_hung_rank_when_others_have_finished(pools: Pools) -> None:
    failure = fail(pools, "misbehave", deadline_s=0.5, rank=0, how="sleep")
    assert failure.reason == "no result from rank 0 within 0.5 s; rank 1 finished"


def test_a_stopped_rank_cannot_hold_up_the_verdict(pools: Pools) -> None:
    failure = fail(pools, "misbehave", deadline_s=0.5, rank=1, how="stop")
    assert (failure.kind, failure.first_rank) == ("timeout", 1)


def test_results_must_be_json_like(pools: Pools) -> None:
    failure = fail(pools, "return_scalar")
    assert failure.kind == "raised"
    assert "TypeError: the result of" in failure.reason
    assert "['losses'][1] is a numpy.float32, not a JSON-like builtin" in failure.reason


def test_misuse_is_refused(pools: Pools) -> None:
    with pytest.raises(TypeError, match="payload"):
        run(pools, "identity", value=(1, 2))
    with pytest.raises(ValueError, match="world_size"):
        run(pools, "identity", world_size=9)
    with pytest.raises(ValueError, match="deadline_s"):
        pools.run(_task("identity"), world_size=1, deadline_s=0)


# Ends of the owner


def test_interrupt_of_the_owner_ends_the_ranks(pools: Pools) -> None:
    before = pids(pools, world_size=2)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(pools, "misbehave", rank=0, how="sleep")
    assert time.monotonic() - start_s < 3
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert len(pids(pools, world_size=2)) == 2


def test_death_of_the_owner_ends_ranks_and_server() -> None:
    program = OWNER.format(path=sys.path, tasks=TASKS)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        processes = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(processes) == 4
        time.sleep(0.5)
        owner.kill()
    wait_until_gone(processes)


def test_death_of_the_server_is_a_fault_of_the_pool_and_not_for_ever(other_pools: Pools) -> None:
    server = run(other_pools, "surroundings", names=[])[0]["server"]
    ranks = pids(other_pools, world_size=2)
    os.kill(server, signal.SIGKILL)
    wait_until_gone(ranks)
    with pytest.raises(RuntimeError, match="rank server failed"):
        run(other_pools, "identity")
    assert len(run(other_pools, "identity")) == 2


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[int], *, limit_s: float = 5.0) -> None:
    until_s = time.monotonic() + limit_s
    while alive := [pid for pid in processes if is_alive(pid)]:
        assert time.monotonic() < until_s, f"still alive: {alive}"
        time.sleep(0.02)
