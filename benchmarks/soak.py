"""One pool for many cells: `python -m benchmarks.soak [--cells 500] [--write]`.

Trains the same cell with another seed each time, on the same two ranks, and looks for what adds up: memory of ranks,
time of a run, numerics. Every 50th run is made again in fresh processes; its tensors must have the same bits. Exit
status 1 if one differs, or if a rank has grown by a page or more for each run between the first and the last tenth.

Memory is the resident set. That part of it which no other process shares, the unique set, grows without a leak: ranks
are forks of the rank server, and each page of its objects is copied when a rank first counts a reference to one of them
(600 process groups made and ended: unique set +7 MiB, resident set +2 MiB, all but 0.2 MiB with the first collectives).
"""

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks.pages import PROJECT, write_block
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

PAGE = PROJECT / "docs" / "performance.md"
FRESH_EVERY = 50
MEBI = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def digest(store: RecordStore, seed: int) -> tuple[str, float]:
    """Of the tensors that a run leaves, in the order of the ranks; and its seconds."""
    start_s = time.perf_counter()
    directory = CaseRuns(store).run(Cell(mesh="dp2", seed=seed)).directory  # each run is a case, with its own deadline
    seconds = time.perf_counter() - start_s
    files = sorted(directory.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(), seconds


def ranks_bytes() -> int:
    """Of the largest rank: children of this process's rank server."""
    servers = psutil.Process().children()
    return max(rank.memory_info().rss for server in servers for rank in server.children())


def open_store(directory: str, pools: Pools) -> RecordStore:
    version = str(torch.__version__)
    return RecordStore(Path(directory), "soak", version, defect=None, deadline_s=120.0, pools=pools)


def main() -> int:
    parser = argparse.ArgumentParser(description="Many cells on the same ranks.")
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--write", action="store_true", help=f"put the figures into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    digests, seconds, held = [], [], []
    with tempfile.TemporaryDirectory() as directory, Pools() as pools:
        store = open_store(directory, pools)
        for seed in range(arguments.cells):
            found, took_s = digest(store, seed)
            digests.append(found)
            seconds.append(took_s)
            held.append(ranks_bytes())
    checked = range(0, arguments.cells, FRESH_EVERY)
    with tempfile.TemporaryDirectory() as directory, Pools(isolate=True) as pools:
        fresh = open_store(directory, pools)
        differ = [seed for seed in checked if digest(fresh, seed)[0] != digests[seed]]
    tenth = max(1, arguments.cells // 10)
    first, last = (statistics.median(part) for part in (held[1 : tenth + 1], held[-tenth:]))
    first_s, last_s = (statistics.median(part) for part in (seconds[1 : tenth + 1], seconds[-tenth:]))
    text = (
        f"`python -m benchmarks.soak --cells {arguments.cells} --write`, torch {torch.__version__}, gloo, two ranks: "
        f"resident set of the larger rank {first / MEBI:.1f} MiB in the first tenth of the runs, {last / MEBI:.1f} MiB "
        f"in the last; "
        f"median run {first_s:.2f} s and {last_s:.2f} s; {len(checked) - len(differ)} of {len(checked)} runs have the "
        f"same bits in fresh processes."
    )
    print(text)
    if arguments.write:
        write_block(PAGE, "soak", text)
    return int(bool(differ) or last - first >= arguments.cells * PAGE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
