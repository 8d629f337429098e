"""Time per case of a check under this suite's pools and under torch's own test harnesses.

    python -m benchmarks.harness [--runs 20] [--write]

`MultiProcessTestCase` starts processes for each test. `MultiProcContinuousTest` keeps processes, with one process
group, for all tests of a class, and cannot go on after the first fault. This suite keeps processes too, makes a process
group for each case, and replaces processes that have failed. Each harness runs the check (`step_check.py`) `--runs`
times in one session of its own; the rounds alternate between harnesses, so that other load of the machine affects all
of them. Seconds per case include the start of processes; "warm" is the median of all cases but the first. `--write`
puts the table into docs/performance.md.
"""

import argparse
import os
import statistics
import time
import unittest
from collections.abc import Callable

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from benchmarks.documents import PROJECT, write_block
from benchmarks.step_check import check_one_step
from conformance.plan.cells import Cell
from conformance.run.pool import Pools, Task

DOCUMENT = PROJECT / "docs" / "performance.md"
MESHES = ("dp2", "dp4", "dp2-tp2")
DEADLINE_S = 120.0
OURS, SPAWNED, CONTINUOUS = "this suite", "MultiProcessTestCase", "MultiProcContinuousTest"


class _Spawned(MultiProcessTestCase):
    mesh = ""

    @property
    def world_size(self) -> int:
        return Cell(mesh=self.mesh).world_size

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_step(self) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )
        torch.set_num_threads(1)
        check_one_step(self.mesh)
        dist.destroy_process_group()


class _Continuous(MultiProcContinuousTest):
    mesh = ""

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def test_step(self) -> None:
        torch.set_num_threads(1)
        check_one_step(self.mesh)


def _classes(base: type[unittest.TestCase]) -> dict[str, type[unittest.TestCase]]:
    """Return a class for each mesh, to be put at module level, where spawned processes find it."""
    return {
        mesh: type(f"{base.__name__}_{mesh.replace('-', '_')}", (base,), {"mesh": mesh, "__module__": __name__})
        for mesh in MESHES
    }


_SPAWNED, _CONTINUOUS = _classes(_Spawned), _classes(_Continuous)
for _class in (*_SPAWNED.values(), *_CONTINUOUS.values()):
    globals()[_class.__name__] = _class
for _mesh, _class in _CONTINUOUS.items():
    _class.world_size = Cell(mesh=_mesh).world_size  # type: ignore[attr-defined]


def _torchs(case: type[unittest.TestCase], runs: int) -> list[float]:
    """Return the seconds of each run of the test in one session; the last run includes the end of the class."""
    seconds: list[float] = []
    result = unittest.TestResult()
    case.setUpClass()
    for run in range(runs):
        start_s = time.perf_counter()
        case("test_step").run(result)
        if run == runs - 1:
            case.tearDownClass()
        seconds.append(time.perf_counter() - start_s)
    for _, text in (*result.failures, *result.errors):
        raise RuntimeError(f"{case.__name__} failed:\n{text}")
    return seconds


def _ours(mesh: str, runs: int) -> list[float]:
    seconds: list[float] = []
    task = Task("benchmarks.step_check:on_ranks", {"mesh": mesh})
    world_size = Cell(mesh=mesh).world_size
    start_s = time.perf_counter()
    with Pools() as pools:
        for run in range(runs):
            pools.run(task, world_size=world_size, deadline_s=DEADLINE_S)
            if run == runs - 1:
                pools.close()
            seconds.append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
    return seconds


def _harnesses(runs: int) -> dict[str, Callable[[str], list[float]]]:
    """Return functions from a mesh to the seconds of each run, by name of the harness."""
    return {
        OURS: lambda mesh: _ours(mesh, runs),
        CONTINUOUS: lambda mesh: _torchs(_CONTINUOUS[mesh], runs),
        SPAWNED: lambda mesh: _torchs(_SPAWNED[mesh], runs),
    }


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="Seconds per case under three harnesses.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the ranks of this suite
    rows = []
    for mesh in MESHES:
        seconds = {name: run(mesh) for name, run in _harnesses(arguments.runs).items()}
        ours = statistics.mean(seconds[OURS])
        for name, all_s in seconds.items():
            mean = statistics.mean(all_s)
            warm = statistics.median(all_s[1:]) if len(all_s) > 1 else mean
            rows.append([mesh, name, mean, all_s[0], warm, mean / ours])
            print(mesh, name, f"{mean:.2f} s per case", flush=True)
    headers = ["mesh", "harness", "s per case", "first", "warm", "ratio to this suite"]
    table = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f")
    print(table)
    if arguments.write:
        command = f"python -m benchmarks.harness --runs {arguments.runs} --write"
        facts = f"`{command}`, torch {torch.__version__}, gloo, {len(os.sched_getaffinity(0))} processors:"
        write_block(DOCUMENT, "harness", f"{facts}\n\n{table}")


if __name__ == "__main__":
    main()
