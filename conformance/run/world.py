"""Worlds: the ranks of one world on this host, all ranks unless the world spans hosts."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from conformance.run.devices.leases import Lease
from conformance.run.failures import PoolError
from conformance.run.ranks.client import START_LIMIT_S, RankHandle, ServerProcess, dump_stacks
from conformance.run.ranks.flight_recorder import collect_dumps
from conformance.run.ranks.messages import KEPT_STORE, READY, Assignment, RankReport, Task

SETTLE_S = 1.0
"""Time for the remaining ranks to report their state after the first failure."""
_STOP_POLL_S = 0.05


class World:
    """Rank processes that serve one task after another, until a task fails or leaves something behind."""

    def __init__(
        self, server: ServerProcess, *, world_size: int, ranks: range, lease: Lease | None, task: Task | None = None
    ) -> None:
        """`task` is the first one, which tells the modules and the template that its ranks need."""
        self._server = server
        self._lease = lease
        self._directory = Path(tempfile.mkdtemp(prefix=f"world{world_size}-", dir=server.directory))
        self._tasks = 0
        self._ended_s = time.monotonic()
        self._closed = False
        self._exit_codes: list[int | None] | None = None
        self._ranks: list[RankHandle] = []
        try:
            self._ranks = server.start(
                ranks,
                world_size=world_size,
                directory=self._directory,
                lease=lease,
                compiles=task is not None and task.compiles,
                template=task.template if task else None,
            )
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """True if all ranks are alive."""
        return not self._closed and not wait([rank.pidfd for rank in self._ranks], timeout=0)

    @property
    def idle_s(self) -> float:
        """Time since the last task of a world that is not running a task."""
        return time.monotonic() - self._ended_s

    def run(
        self,
        task: Task,
        *,
        deadline_s: float,
        env: dict[str, str],
        rendezvous: str | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[RankReport, ...]:
        """Run one task; returns a report for each rank on this host.

        Anything but a clean success of all ranks ends this world. The process group of the task uses `rendezvous`, an
        `init_method` that hosts can share, or the store of this world. After the failure of one rank, or after `stop`
        tells of a failure on another host, the other ranks are given `SETTLE_S` before they are ended.
        """
        self._tasks += 1
        number = f"task {self._tasks}".encode()
        rendezvous = rendezvous or f"{KEPT_STORE}://{self._directory}?task={self._tasks}"
        until_s = time.monotonic() + deadline_s
        try:
            self._assign(Assignment(task, rendezvous, until_s, env), number=number)
            reports = self._collect(number, until_s=until_s, stop=stop)
            if len(reports) < len(self._ranks) or any(report.state != "finished" for report in reports.values()):
                final_reports = self._post_mortem(reports)
                self.close()
                return final_reports
        except BaseException:
            self.close()
            raise
        self._ended_s = time.monotonic()
        final_reports = tuple(rank.with_diagnostics(reports[rank.rank]) for rank in self._ranks)
        if any(report.leaks for report in final_reports):
            self.close()
        return final_reports

    def close(self) -> None:
        """End all ranks with their descendants and remove their files."""
        if self._closed:
            return
        self._closed = True
        try:
            all_gone = None not in self._kill_and_reap()
            if self._lease and all_gone:
                self._lease.release()
            elif self._lease:
                self._lease.detach()
        finally:
            for rank in self._ranks:
                rank.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _kill_and_reap(self) -> list[int | None]:
        """Kill all ranks, once; returns their exit codes."""
        if self._exit_codes is None:
            self._exit_codes = self._server.kill_and_reap([rank.pid for rank in self._ranks])
        return self._exit_codes

    def _await_start(self) -> None:
        reports = self._collect(READY, until_s=time.monotonic() + START_LIMIT_S)
        if any(report.state != "finished" for report in reports.values()) or len(reports) < len(self._ranks):
            outputs = "\n".join(rank.output_tail() for rank in self._ranks)
            raise PoolError(f"ranks did not start: {outputs.strip()}")

    def _assign(self, assignment: Assignment, *, number: bytes) -> None:
        self._ranks[0].files.assignment.write_bytes(msgspec.msgpack.encode(assignment))
        for rank in self._ranks:
            rank.notify(number)

    def _collect(
        self, number: bytes, *, until_s: float, stop: Callable[[], bool] | None = None
    ) -> dict[int, RankReport]:
        """Wait for a report of every rank until the point in time `until_s`, or `SETTLE_S` after the first failure."""
        reports: dict[int, RankReport] = {}
        while waiting := [rank for rank in self._ranks if rank.rank not in reports]:
            left_s = max(0.0, until_s - time.monotonic())
            watched = [handle for rank in waiting for handle in rank.watched]
            if not wait(watched, timeout=min(left_s, _STOP_POLL_S) if stop else left_s):
                if time.monotonic() >= until_s:
                    break
                if stop and stop():
                    stop, until_s = None, min(until_s, time.monotonic() + SETTLE_S)
                continue
            for rank in waiting:
                report = rank.poll(number)
                if report is not None:
                    reports[rank.rank] = report
                    if report.state != "finished":
                        until_s = min(until_s, time.monotonic() + SETTLE_S)
        return reports

    def _post_mortem(self, reports: Mapping[int, RankReport]) -> tuple[RankReport, ...]:
        """End all ranks; returns a report for each rank with exit code, stacks and output."""
        dump_stacks([rank for rank in self._ranks if rank.rank not in reports])
        collect_dumps([rank.files for rank in self._ranks])
        return tuple(
            rank.with_diagnostics(
                _with_exit_code(reports[rank.rank], exit_code)
                if rank.rank in reports
                else RankReport(rank=rank.rank, state="hung")
            )
            for rank, exit_code in zip(self._ranks, self._kill_and_reap(), strict=True)
        )


def _with_exit_code(report: RankReport, exit_code: int | None) -> RankReport:
    return msgspec.structs.replace(report, exit_code=exit_code) if report.state == "died" else report
