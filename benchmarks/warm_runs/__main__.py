"""Start to first result, and warm runs, of the suite's ranks and of torch's `MultiProcContinuousTest`.

Both harnesses build the trainer of `reference_trainer` and train three steps, in turn, on the same meshes. Only the
suite's looks for what a run has left behind. Prints a table; `--json` prints JSON instead.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
from tabulate import tabulate

from benchmarks.warm_runs.continuous_tests import CLASSES
from benchmarks.warm_runs.steps import MESHES
from conformance.plan.cells import cell_from_id
from conformance.run.devices.hardware import ONE_THREAD
from conformance.run.experiment import job_of, json_like
from conformance.run.pool import Pools, Task

DEADLINE_S = 300.0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one harness on one mesh: wall time, and processor time of all its processes.

    Of warm runs it has the medians.
    """

    mesh: str
    harness: str
    first_s: float
    """Start to first result."""
    warm_s: float
    warm_processor_s: float


class Harness(Protocol):
    """Ranks of one mesh; the first run starts them."""

    name: str

    def run(self) -> None:
        """Train once on all ranks."""

    def close(self) -> None:
        """End all ranks."""


class SuiteRanks:
    """Ranks of the suite's pool."""

    name = "conformance"

    def __init__(self, mesh: str) -> None:
        cell = cell_from_id(f"{mesh}-fp32-default-meta")
        # Processors are not leased, for which sessions wait: torch's harness would not wait for them.
        self._pools, self._world_size = Pools(share_processors=False), cell.world_size
        self._directory = tempfile.TemporaryDirectory()
        payload = json_like(job_of(cell, Path(self._directory.name), defect=None))
        self._task = Task("benchmarks.warm_runs.steps:trained", payload)

    def run(self) -> None:
        """Train once on all ranks."""
        self._pools.run(self._task, world_size=self._world_size, deadline_s=DEADLINE_S)

    def close(self) -> None:
        """End all ranks."""
        self._pools.close()
        self._directory.cleanup()


class ContinuousTests:
    """Ranks of a class of torch's tests."""

    name = "MultiProcContinuousTest"

    def __init__(self, mesh: str) -> None:
        self._class = CLASSES[mesh]

    def run(self) -> None:
        """Train once on all ranks. Raises RuntimeError if the test fails."""
        result = unittest.TestResult()
        self._class("test_trains").run(result)  # type: ignore[no-untyped-call]
        if not result.wasSuccessful() or result.skipped:
            raise RuntimeError(f"the test did not pass: {result.failures or result.errors or result.skipped}")

    def close(self) -> None:
        """End all ranks."""
        self._class.tearDownClass()  # type: ignore[no-untyped-call]


def compared(mesh: str, *, runs: int) -> list[Timing]:
    """Run both harnesses on a mesh in turn."""
    harnesses: list[Harness] = [SuiteRanks(mesh), ContinuousTests(mesh)]
    try:
        first = [_measured(harness.run) for harness in harnesses]
        for harness in harnesses:  # ranks may have been idle for so long that their pool has ended them
            harness.run()
        warm = [[_measured(harness.run) for harness in harnesses] for _ in range(runs)]
    finally:
        for harness in harnesses:
            harness.close()
    return [
        Timing(
            mesh=mesh,
            harness=harness.name,
            first_s=round(start_s, 3),
            warm_s=round(statistics.median(wall_s for wall_s, _ in times), 3),
            warm_processor_s=round(statistics.median(processor_s for _, processor_s in times), 3),
        )
        for harness, (start_s, _), times in zip(harnesses, first, zip(*warm, strict=True), strict=True)
    ]


def _measured(run: Callable[[], None]) -> tuple[float, float]:
    """Return wall and processor time of a run."""
    start_s, processor_s = time.monotonic(), _processor_s()
    run()
    return time.monotonic() - start_s, _processor_s() - processor_s


def _processor_s() -> float:
    """Return the processor time of this process and of its living descendants."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Compare both harnesses on the meshes that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("meshes", nargs="*", metavar="MESH", help=f"of {', '.join(MESHES)} (default: all)")
    parser.add_argument("--runs", type=int, default=15, help="warm runs of each harness (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if unknown := set(options.meshes) - set(MESHES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(MESHES)}")
    os.environ |= ONE_THREAD
    timings = [each for mesh in options.meshes or MESHES for each in compared(mesh, runs=options.runs)]
    if options.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(timings)) + b"\n")
        return
    headers = ["mesh", "harness", "start to first result, s", "warm, s", "warm, processor time, s"]
    print(tabulate([msgspec.structs.astuple(each) for each in timings], headers=headers, tablefmt="github"))


if __name__ == "__main__":
    main()
