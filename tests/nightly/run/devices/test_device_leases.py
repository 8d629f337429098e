"""Two sessions of four workers on eight fake devices, while workers and ranks are killed at random."""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from conformance.project import PROJECT
from conformance.run.devices.leases import Leases
from tests.support.lease_tasks import DEVICES

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
        command = [sys.executable, "-m", "tests.support.lease_tasks", str(self._directory), str(seed), str(TASKS)]
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
