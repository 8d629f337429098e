"""Warm pools of rank processes: run a function in every rank of a world, again and again.

A pytest worker owns one `Pools` object. Its ranks are forks of a rank server that has torch loaded; a rank is re-used
for task after task, until one fails or leaves something behind. Then its whole pool is ended, and the next task
starts a new one (forks, less than 0.1 s). The worker itself never imports torch here and never waits without a limit.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from conformance.engine.rank_control import START_LIMIT_S, ServerProcess, dump_stacks
from conformance.engine.rank_failure import FailureKind, PoolError, RunFailed, judge
from conformance.engine.rank_messages import (
    MAX_WORLD_SIZE,
    READY,
    Assignment,
    RankContext,
    RankReport,
    Task,
    require_json_like,
)

__all__ = ["FailureKind", "PoolError", "Pools", "RankContext", "RankReport", "RunFailed", "Task"]

MAX_WARM_RANKS = 16
SETTLE_S = 1.0

# Libraries read these variables once per process, so ranks that have used other values cannot serve the task.
LATCHED_PREFIXES = ("CUBLAS", "CUDA", "GLOO_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH")

PoolKey = tuple[int, str, tuple[tuple[str, str], ...]]


class Pools:
    """All warm ranks of one pytest worker. Not for use by several threads at once.

    Nothing starts before the first task. `sys.path`, the working directory and the environment of that moment are
    those of all ranks to come. At most `MAX_WARM_RANKS` rank processes stay; the least recently used pools end first.
    """

    def __init__(self) -> None:
        self._server: ServerProcess | None = None
        self._pools: dict[PoolKey, _Pool] = {}  # the most recently used last

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        """Run `task` on `world_size` ranks and return the results in the order of the ranks.

        `deadline_s` is one limit for all ranks together; it starts when the pool is warm. `env` is added to the
        environment of the ranks for this task.

        Raises:
            RunFailed: a rank raised, died, or had no result at the deadline. Its pool is gone by then.
            PoolError: the ranks could not be started, or the rank server died.
            TypeError: the task's payload is not JSON-like.
            ValueError: `world_size` is not in 1..8, or `deadline_s` is not positive.
        """
        return [
            report.value for report in self.run_reports(task, world_size=world_size, deadline_s=deadline_s, env=env)
        ]

    def run_reports(
        self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None
    ) -> tuple[RankReport, ...]:
        """Like `run`, but return the whole report of each rank: its value, its leaks, the end of its output."""
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size is {world_size}, not in 1..{MAX_WORLD_SIZE}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}, not positive")
        require_json_like(task.payload, where="the task's payload")
        env = dict(env or {})
        return self._pool(world_size, task.kind, env).run(task, deadline_s=deadline_s, env=env)

    def release(self) -> None:
        """End all ranks, so that they hold no device and no memory; the next task starts new ones."""
        while self._pools:
            self._pools.popitem()[1].close()

    def close(self) -> None:
        """End all ranks, their descendants and the rank server. The object may be used again afterwards."""
        self.release()
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pool(self, world_size: int, kind: str, env: Mapping[str, str]) -> "_Pool":
        key = (world_size, kind, latched(env))
        pool = self._pools.pop(key, None)
        if pool is None or not pool.is_usable():
            if pool is not None:
                pool.close()
            self._make_room(world_size)
            pool = _Pool(self._running_server(), world_size=world_size)
        self._pools[key] = pool
        return pool

    def _make_room(self, world_size: int) -> None:
        while self._pools and sum(key[0] for key in self._pools) + world_size > MAX_WARM_RANKS:
            oldest = next(iter(self._pools))
            self._pools.pop(oldest).close()

    def _running_server(self) -> ServerProcess:
        if self._server is None or self._server.closed:
            self.release()
            self._server = ServerProcess()
        return self._server


class _Pool:
    """The ranks of one world."""

    def __init__(self, server: ServerProcess, *, world_size: int) -> None:
        self._server = server
        self._directory = Path(tempfile.mkdtemp(prefix=f"world{world_size}-", dir=server.directory))
        self._tasks = 0
        self._closed = False
        self._exit_codes: list[int | None] | None = None
        self._ranks = server.start(world_size, directory=self._directory)
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        """Whether all ranks are alive."""
        return not self._closed and not wait([rank.pidfd for rank in self._ranks], timeout=0)

    def run(self, task: Task, *, deadline_s: float, env: dict[str, str]) -> tuple[RankReport, ...]:
        """Run one task; whatever happens but a clean success ends the pool."""
        try:
            reports = self._run(task, deadline_s=deadline_s, env=env)
        except BaseException:
            self.close()
            raise
        if any(report.leaks for report in reports):
            self.close()
        return reports

    def close(self) -> None:
        """End all ranks with their descendants and remove their files."""
        if self._closed:
            return
        self._closed = True
        try:
            self._bury()
        finally:
            for rank in self._ranks:
                rank.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _bury(self) -> list[int | None]:
        """End all ranks, once; return their exit codes."""
        if self._exit_codes is None:
            self._exit_codes = self._server.bury([rank.pid for rank in self._ranks])
        return self._exit_codes

    def _await_start(self) -> None:
        reports = self._collect(READY, until_s=time.monotonic() + START_LIMIT_S)
        if any(report.state != "finished" for report in reports.values()) or len(reports) < len(self._ranks):
            outputs = "\n".join(rank.output_tail() for rank in self._ranks)
            raise PoolError(f"ranks did not start: {outputs.strip()}")

    def _run(self, task: Task, *, deadline_s: float, env: dict[str, str]) -> tuple[RankReport, ...]:
        self._tasks += 1
        number = f"task {self._tasks}".encode()
        rendezvous = self._directory / f"rendezvous{self._tasks}"
        deadline = time.monotonic() + deadline_s
        self._assign(
            Assignment(task=task, rendezvous=f"file://{rendezvous}", deadline_s=deadline, env=env), number=number
        )
        reports = self._collect(number, until_s=deadline)
        if len(reports) < len(self._ranks) or any(report.state != "finished" for report in reports.values()):
            raise judge(self._post_mortem(reports), deadline_s=deadline_s)
        rendezvous.unlink(missing_ok=True)
        return tuple(rank.illustrate(reports[rank.rank]) for rank in self._ranks)

    def _assign(self, assignment: Assignment, *, number: bytes) -> None:
        self._ranks[0].files.assignment.write_bytes(msgspec.msgpack.encode(assignment))
        for rank in self._ranks:
            rank.ring(number)

    def _collect(self, number: bytes, *, until_s: float) -> dict[int, RankReport]:
        """Wait for a report of every rank until the moment `until_s`, or for `SETTLE_S` after the first failure."""
        reports: dict[int, RankReport] = {}
        while waiting := [rank for rank in self._ranks if rank.rank not in reports]:
            watched = [handle for rank in waiting for handle in rank.watched]
            if not wait(watched, timeout=max(0.0, until_s - time.monotonic())):
                break
            for rank in waiting:
                report = rank.poll(number)
                if report is not None:
                    reports[rank.rank] = report
                    if report.state != "finished":
                        until_s = min(until_s, time.monotonic() + SETTLE_S)
        return reports

    def _post_mortem(self, reports: Mapping[int, RankReport]) -> tuple[RankReport, ...]:
        """End the pool and return one report for every rank, with exit codes, stacks and output."""
        dump_stacks([rank for rank in self._ranks if rank.rank not in reports])
        return tuple(
            rank.illustrate(
                _with_exit_code(reports[rank.rank], exit_code)
                if rank.rank in reports
                else RankReport(rank=rank.rank, state="hung")
            )
            for rank, exit_code in zip(self._ranks, self._bury(), strict=True)
        )


def latched(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables in `env` that only fresh processes are sure to obey."""
    return tuple(sorted(item for item in env.items() if item[0].startswith(LATCHED_PREFIXES)))


def _with_exit_code(report: RankReport, exit_code: int | None) -> RankReport:
    return msgspec.structs.replace(report, exit_code=exit_code) if report.state == "died" else report
