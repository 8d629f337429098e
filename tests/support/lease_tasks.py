"""Program of a pytest worker in `test_device_leases.py`, and the task of its ranks on fake devices."""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from conformance.run.devices.leases import Leases
from conformance.run.pool import PoolError, Pools, RunFailed, Task
from conformance.run.ranks.messages import RankContext

DEVICES = tuple(f"GPU-{number}" for number in range(8))
DEADLINE_S = 60.0


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
    """Run one world after another, of any size, on devices that others want too, like a worker of a session."""
    choose = random.Random(seed)
    done = directory / f"done-{seed}"
    with Pools(devices=Leases(DEVICES, directory=directory / "leases")) as pools:
        while not done.exists() or len(done.read_text()) < tasks:
            payload = {"directory": str(directory), "seconds": choose.choice([0.0, 0.05, 0.2])}
            world_size = choose.randint(1, len(DEVICES))
            task = Task("tests.support.lease_tasks:use_device", payload, accelerated=True)
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


if __name__ == "__main__":
    work(Path(sys.argv[1]), seed=int(sys.argv[2]), tasks=int(sys.argv[3]))
