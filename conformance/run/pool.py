"""Warm pools of rank processes, which run a function in every rank of a world, again and again.

A pytest worker owns one `Pools` object. Its ranks are forks of a rank server that has torch loaded; a rank is re-used
for task after task, until a task fails or leaves something behind. Then all ranks of the pool are ended, and the next
task starts a new pool (forks, less than 0.1 s). The worker itself never waits without a time limit.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from conformance.numerics.arithmetic import KERNELS_VARIABLE, SUMS_VARIABLE
from conformance.run.devices.hardware import devices_for
from conformance.run.devices.leases import Lease, LeaseError, Leases, processor_slots
from conformance.run.failures import FailureKind, PoolError, RunFailed, find_cause
from conformance.run.ranks.client import ServerProcess
from conformance.run.ranks.messages import (
    MAX_WORLD_SIZE,
    RankContext,
    RankReport,
    Task,
    Template,
    require_json_like,
)
from conformance.run.ranks.preload import EXPERIMENTS
from conformance.run.world import World
from conformance.sim.building import LIBRARY_VARIABLE

__all__ = ["FailureKind", "PoolError", "Pools", "RankContext", "RankReport", "RunFailed", "Task", "Template"]

MAX_WARM_RANKS = 16
IDLE_LIMIT_S = 30.0  # forking ranks again takes a tenth of a second; each rank has 50 to 100 MiB of its own
IDLE_POLL_S = 0.2

# Libraries read these variables once per process, so ranks that have used other values cannot serve the task.
LATCHED_PREFIXES = (
    "CUBLAS",
    "CUDA",
    "GLOO_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    LIBRARY_VARIABLE,
    KERNELS_VARIABLE,
    SUMS_VARIABLE,
)


class PoolKey(NamedTuple):
    """Properties that ranks must share with a task to serve the task."""

    world_size: int
    ranks: range
    kind: str
    accelerated: bool
    latched: tuple[tuple[str, str], ...]


class RunsTasks(Protocol):
    """Interface of `Pools` that a record store uses; substitutes may have their ranks elsewhere."""

    waited_s: float
    """Time spent waiting for occupied devices or processors, in all tasks so far."""
    trained_s: float
    """Time that the slowest rank of each task spent in trainers, in all tasks so far that have ended well."""
    max_world_size: int

    def prepare(self, template: Template | None = None) -> None:
        """Start the processes that the first task needs, or that the first one with a template needs."""

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        """Run a task on all ranks of a world; returns the results in the order of the ranks."""

    def close(self) -> None:
        """End all ranks."""


class Pools:
    """Pools of warm ranks of one pytest worker, for use by one thread.

    Nothing starts before the first task. `sys.path`, the working directory and the environment at that point in time
    are those of all ranks to come. At most `MAX_WARM_RANKS` rank processes stay: the least recently used pools end
    first. A pool that has been idle for `IDLE_LIMIT_S` ends too.

    Each rank of an accelerated task has one of `devices` as long as its pool lives, shared with other ranks only if
    devices are too few; idle pools end as soon as a process waits for devices. All other ranks share the processors:
    with `share_processors` a task waits until as many processors are free as its world has ranks, or all processors for
    a wider world; idle ranks need no processor. With `isolate` no process serves two tasks.
    """

    def __init__(
        self,
        *,
        devices: Leases | None = None,
        share_processors: bool = True,
        isolate: bool = False,
        tasks: str = EXPERIMENTS,
    ) -> None:
        """`tasks` tell which modules most tasks will need, see `preload`; others are imported in each rank."""
        self._server: ServerProcess | None = None
        self._pools: dict[PoolKey, World] = {}  # the most recently used last
        self._processors = Leases(processor_slots()) if share_processors else None
        self._devices = devices
        self._isolate, self._tasks = isolate, tasks
        self._busy = threading.RLock()
        self._release_thread: _ReleaseThread | None = None
        self.max_world_size = MAX_WORLD_SIZE
        self.waited_s = 0.0
        """Time spent waiting for occupied devices or processors, in all tasks so far."""
        self.trained_s = 0.0
        """Time that the slowest rank of each task spent in trainers, in all tasks so far that have ended well."""

    def prepare(self, template: Template | None = None) -> None:
        """Start the rank server, which loads torch while the worker does something else, or a template of ranks."""
        server = self._running_server()
        if template is not None:
            server.start_template(template)

    def run(self, task: Task, *, world_size: int, deadline_s: float, env: Mapping[str, str] | None = None) -> list[Any]:
        """Run `task` on `world_size` ranks; returns the results in the order of the ranks.

        `deadline_s` is one limit for all ranks together; it starts when the pool is warm. `env` is added to the
        environment of the ranks for this task.

        Raises:
            RunFailed: a rank raised, died, or had no result at the deadline. The pool is gone by then.
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
        """Run a task like `run`; returns the report of each rank: result, leaks and end of the output."""
        require_runnable(task, world_size=world_size, deadline_s=deadline_s)
        reports = self.run_ranks(task, range(world_size), world_size=world_size, deadline_s=deadline_s, env=env)
        if any(report.state != "finished" for report in reports):
            raise find_cause(reports, deadline_s=deadline_s)
        self.trained_s += max(report.train_s for report in reports)
        return reports

    def run_ranks(
        self,
        task: Task,
        ranks: range,
        *,
        world_size: int,
        deadline_s: float,
        env: Mapping[str, str] | None = None,
        rendezvous: str | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[RankReport, ...]:
        """Run these ranks of a world whose other ranks run on other hosts, see `World.run`. Raises PoolError."""
        env = dict(env or {})
        self._release_thread = self._release_thread or _ReleaseThread(self._release_unused)
        with self._busy, self._processors_for(0 if task.accelerated else len(ranks)):
            world = self._world(ranks, world_size=world_size, task=task, env=env)
            reports = world.run(task, deadline_s=deadline_s, env=env, rendezvous=rendezvous, stop=stop)
            if self._isolate:
                self.release()
            self._release_unused()
        return reports

    def release(self) -> None:
        """End all ranks, which frees their devices and memory; the next task starts new ranks."""
        with self._busy:
            while self._pools:
                self._pools.popitem()[1].close()

    def close(self) -> None:
        """End all ranks, their descendants and the rank server. The object may be used again afterwards."""
        if self._release_thread is not None:
            self._release_thread.stop()
            self._release_thread = None
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

    def _world(self, ranks: range, *, world_size: int, task: Task, env: Mapping[str, str]) -> World:
        key = PoolKey(world_size, ranks, task.kind, task.accelerated, latched(env))
        world = self._pools.pop(key, None)
        if world is None or not world.is_usable:
            if world is not None:
                world.close()
            self._make_room(len(ranks))
            lease = self._lease_devices(len(ranks)) if task.accelerated else None
            server = self._running_server()
            world = World(server, world_size=world_size, ranks=ranks, lease=lease, task=task)
        self._pools[key] = world
        return world

    @contextmanager
    def _processors_for(self, ranks: int) -> Iterator[None]:
        if self._processors is None or not ranks:
            yield
            return
        lease = self._processors.take(min(ranks, len(self._processors.slots)))
        self.waited_s += lease.waited_s
        try:
            yield
        finally:
            lease.release()

    def _lease_devices(self, ranks: int) -> Lease:
        """Lease devices in addition to those of warm pools, or, if that means waiting, after releasing all of those.

        So no process waits while holding devices.
        """
        if self._devices is None:
            raise PoolError("the task needs a device for each rank, and these pools have no devices")
        count = devices_for(ranks, among=len(self._devices.slots))
        with suppress(LeaseError):
            return self._devices.take(count, limit_s=0.0)
        self._release_devices()
        lease = self._devices.take(count)
        self.waited_s += lease.waited_s
        return lease

    def _release_unused(self) -> None:
        """Release the devices of idle pools if a process waits for devices; end pools that have been idle for long."""
        with self._busy:
            if self._devices is not None and self._pools and self._devices.is_contended():
                self._release_devices()
            for key in [key for key, world in self._pools.items() if world.idle_s > IDLE_LIMIT_S]:
                self._pools.pop(key).close()

    def _release_devices(self) -> None:
        for key in [key for key in self._pools if key.accelerated]:
            self._pools.pop(key).close()

    def _make_room(self, ranks: int) -> None:
        while self._pools and sum(len(key.ranks) for key in self._pools) + ranks > MAX_WARM_RANKS:
            oldest = next(iter(self._pools))
            self._pools.pop(oldest).close()

    def _running_server(self) -> ServerProcess:
        if self._server is None or self._server.closed:
            self.release()
            self._server = ServerProcess(tasks=self._tasks)
        return self._server


class _ReleaseThread:
    """Thread that releases devices and ends pools of idle ranks, also in a worker that has no tasks left."""

    def __init__(self, release_unused: Callable[[], None]) -> None:
        self._release_unused = release_unused
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(IDLE_POLL_S):
            with suppress(PoolError):  # the server is gone with all its ranks: the next task starts a new server
                self._release_unused()


def require_runnable(task: Task, *, world_size: int, deadline_s: float) -> None:
    """Raise TypeError or ValueError for arguments that `Pools.run` refuses."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size is {world_size}: give a number from 1 to {MAX_WORLD_SIZE}")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s is {deadline_s}: give a positive number of seconds")
    require_json_like(task.payload, where="the task's payload")


def latched(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables in `env` that need fresh processes."""
    return tuple(sorted(item for item in env.items() if item[0].startswith(LATCHED_PREFIXES)))
