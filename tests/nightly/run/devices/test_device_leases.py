"""Two sessions of four workers on eight fake devices, while workers and ranks are killed at random."""

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conformance.project import PROJECT
from conformance.run.devices.leases import Leases
from conformance.run.pool import PoolError, Pools, RunFailed, Task
from conformance.run.ranks.messages import RankContext

MODULE = "tests.nightly.run.devices.test_device_leases"
"""This module, which is a worker's program too."""
DEVICES = tuple(f"GPU-{number}" for number in range(8))


def use_device(context: RankContext, payload: dict[str, Any]) -> str:
    """Hold a device for a short time. Raises AssertionError if another live process uses the device too."""
    mark = Path(payload["directory"], f"busy-{context.device}")
    before = int(mark.read_text()) if mark.exists() else None
    written = Path(payload["directory"], f"{mark.name}-{os.getpid()}")
    written.write_text(str(os.getpid()))
    written.rename(mark)  # a rank that is killed while it writes must leave no empty mark
    if before is not None and _lives(before):
        Path(payload["directory"], "double-use").write_text(f"{context.device}: {before} and {os.getpid()}")
    time.sleep(payload["seconds"])
    assert mark.read_text() == str(os.getpid()), f"{context.device} was used by {mark.read_text()} meanwhile"
    mark.unlink()
    return context.device


def _lives(pid: int) -> bool:
    """Return whether a process lives; one that was killed may be visible after the kernel has freed its locks."""
    try:
        process = psutil.Process(pid)
        process.wait(0.5)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def work(directory: Path, *, seed: int, tasks: int) -> None:
    """Run one world after another, of any size, on contended devices, like a worker of a session."""
    choose = random.Random(seed)
    done = directory / f"done-{seed}"
    with Pools(devices=Leases(DEVICES, directory=directory / "leases")) as pools:
        while not done.exists() or len(done.read_text()) < tasks:
            payload = {"directory": str(directory), "seconds": choose.choice([0.0, 0.05, 0.2])}
            world_size = choose.randint(1, len(DEVICES))
            task = Task(f"{MODULE}:use_device", payload, accelerated=True)
            try:
                devices = pools.run(task, world_size=world_size, deadline_s=60)
            except RunFailed as failed:  # a rank was killed: the next task gets new ones
                if failed.kind != "crash":
                    raise
            except PoolError as failed:
                if "ranks did not start" not in str(failed):
                    raise
            else:
                assert len(set(devices)) == world_size
                with done.open("a") as file:
                    file.write(".")
        (directory / f"idle-{seed}").touch()
        while not (directory / "over").exists():  # as a worker without more cases, until its session ends
            time.sleep(0.05)


WORKERS = 8
TASKS = 5
KILLS = 6
LIMIT_S = 240.0


class Workers:
    """Pytest workers of two sessions; a worker that was killed is replaced, as by xdist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes = [self._start(seed) for seed in range(WORKERS)]
        self.seen: set[psutil.Process] = set()

    def _start(self, seed: int) -> psutil.Popen:
        command = [sys.executable, "-m", MODULE, str(self._directory), str(seed), str(TASKS)]
        with (self._directory / f"errors-{seed}").open("ab") as errors:
            return psutil.Popen(command, cwd=PROJECT, stderr=errors)

    def look(self) -> list[psutil.Process]:
        """Return all processes that run below the workers now."""
        descendants = []
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                descendants += process.children(recursive=True)
        self.seen.update(descendants)
        return descendants

    def kill_one(self, choose: random.Random) -> None:
        """Kill a worker, or a rank of a busy worker."""
        ranks = [process for process in self.look() if _is_rank(process)]
        if ranks and choose.random() < 0.5:
            with suppress(psutil.NoSuchProcess):
                choose.choice(ranks).kill()
            return
        seed = choose.randrange(WORKERS)
        self._processes[seed].kill()
        self._processes[seed].wait()
        self._processes[seed] = self._start(seed)

    def ended(self) -> list[str]:
        """Return the errors of workers that ended by themselves."""
        return [
            (self._directory / f"errors-{seed}").read_text()
            for seed, process in enumerate(self._processes)
            if process.poll() is not None
        ]

    def end(self) -> list[int]:
        return [process.wait(30) for process in self._processes]


def _is_rank(process: psutil.Process) -> bool:
    """Return whether a process is the child of a rank server."""
    try:
        parent = process.parent()
        return parent is not None and "ranks.server" in " ".join(parent.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path)
    yield started
    (tmp_path / "over").touch()
    for process in started._processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_two_sessions_share_eight_devices(workers: Workers, tmp_path: Path) -> None:
    choose = random.Random(0)
    until_s = time.monotonic() + LIMIT_S
    kills = 0
    while len(list(tmp_path.glob("idle-*"))) < WORKERS:
        assert not (tmp_path / "double-use").exists(), (tmp_path / "double-use").read_text()
        assert workers.ended() == [], "a worker found a device that was not its own"
        assert time.monotonic() < until_s, f"starved: {[file.name for file in tmp_path.iterdir()]}"
        if kills < KILLS and sum(len(file.read_text()) for file in tmp_path.glob("done-*")) > 3 * kills:
            workers.kill_one(choose)
            kills += 1
        workers.look()
        time.sleep(0.1)
    assert kills == KILLS
    assert not (tmp_path / "double-use").exists(), (tmp_path / "double-use").read_text()
    # All workers are idle, with warm ranks; whoever asks gets the devices nevertheless.
    Leases(DEVICES, directory=tmp_path / "leases").take(len(DEVICES), limit_s=10.0).release()
    (tmp_path / "over").touch()
    assert workers.end() == [0] * WORKERS
    assert psutil.wait_procs(workers.seen, timeout=10)[1] == []
    leases = Leases(DEVICES, directory=tmp_path / "leases")
    leases.take(len(DEVICES), limit_s=1.0).release()
    assert list((tmp_path / "leases").glob("ticket-*")) == []


if __name__ == "__main__":
    work(Path(sys.argv[1]), seed=int(sys.argv[2]), tasks=int(sys.argv[3]))
