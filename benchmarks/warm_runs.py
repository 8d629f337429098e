"""Wall and processor time of warm runs: `python -m benchmarks.warm_runs [CELL ...] [--runs 10] [--json] [--write]`.

Runs each cell with one seed after another, on ranks that have run the cell before. The first run of a cell forks ranks
and uses torch for the first time; it is not counted. Processor time is that of all ranks, their server and this
process. On a machine that others use too it is the better guide: ranks that wait for the processor, or for each other,
do not spend it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.instruments.facts import RankFacts
from conformance.plan.cells import Cell, cell_from_id
from conformance.run.case_runs import CaseRuns
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DOCUMENT = PROJECT / "docs" / "performance.md"
CELLS = (Cell(mesh="dp2"), Cell(mesh="dp2-tp2"))
WARM_UPS = 2


class Run(msgspec.Struct, frozen=True):
    """Durations of one run, in seconds."""

    wall_s: float
    """From the request until the record is on disk."""
    processor_s: float
    """Processor time of all processes together, waiting excluded."""
    train_s: float
    """Time that the slowest rank spent in its trainer, with the work of instruments."""
    steps_s: float
    """Time of the steps on the slowest rank, without the work that instruments do between operators."""


def processor_s() -> float:
    """Return the processor time of this process, its rank server and the ranks, which are all alive, in seconds."""
    this = psutil.Process()
    spent = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


def timed_run(store: RecordStore, cell: Cell) -> Run:
    """Run a cell that the store has no record of."""
    trained_before_s, processor_before_s = store.pools.trained_s, processor_s()
    start_s = time.perf_counter()
    record = CaseRuns(store).run(cell)
    wall_s = time.perf_counter() - start_s
    used_s = processor_s() - processor_before_s
    return Run(wall_s, used_s, store.pools.trained_s - trained_before_s, max(map(_steps_s, record.ranks)))


def _steps_s(facts: RankFacts) -> float:
    return sum(facts.step_s)


def warm_runs(cell: Cell, *, runs: int) -> list[Run]:
    """Run a cell with as many seeds after warm-up; returns the durations."""
    with tempfile.TemporaryDirectory() as directory, Pools(share_processors=False) as pools:
        store = RecordStore(
            Path(directory), "warm-runs", str(torch.__version__), defect=None, deadline_s=120.0, pools=pools
        )
        for seed in range(1, WARM_UPS + 1):
            CaseRuns(store).run(cell.but(seed=seed))
        return [timed_run(store, cell.but(seed=WARM_UPS + number)) for number in range(1, runs + 1)]


def medians(runs: list[Run]) -> Run:
    """Return the median of each duration."""
    return Run(*(statistics.median(getattr(run, name) for run in runs) for name in Run.__struct_fields__))


def main() -> int:
    """Print the medians, and write them into the document if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description="Wall and processor time of runs on warm ranks.")
    parser.add_argument("cells", nargs="*", type=cell_from_id, metavar="CELL", default=CELLS, help="id of a cell")
    parser.add_argument("--runs", type=int, default=10, help="runs of each cell after warm-up")
    parser.add_argument("--json", action="store_true", help="print every run instead of medians, as JSON")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    measured = {cell.id: warm_runs(cell, runs=arguments.runs) for cell in arguments.cells}
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(measured)))
        return 0
    rows = [[cell, *msgspec.structs.astuple(medians(runs))] for cell, runs in measured.items()]
    headers = ["cell", "wall (s)", "processor (s)", "trainer (s)", "steps (s)"]
    table = tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f")
    text = (
        f"`python -m benchmarks.warm_runs --runs {arguments.runs}`, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} processors, medians:\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "warm-runs", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
