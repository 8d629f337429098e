"""Soak test, many cells on one pool: `python -m benchmarks.soak [--cells 500] [--write]`.

Trains the same cell with another seed each time, on the same two ranks, and looks for drift in memory of ranks, time of
a run, and numerics. Every 50th run is repeated in fresh processes; its tensors must have the same bits. Exit status 1
if a run differs, or if a rank has grown by a page or more for each run between the first and the last tenth.

Memory is the resident set. The unique set, pages that no other process shares, grows without a leak: ranks are forks of
the rank server, and each page of its objects is copied when a rank first counts a reference to an object in it (600
process groups made and ended: unique set +7 MiB, resident set +2 MiB, all but 0.2 MiB with the first collectives).
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

from benchmarks.documents import PROJECT, write_block
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DOCUMENT = PROJECT / "docs" / "performance.md"
FRESH_EVERY = 50
MEBI = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def digest(store: RecordStore, seed: int) -> tuple[str, float]:
    """Run a cell; returns the digest of its tensors in the order of the ranks, and the seconds."""
    start_s = time.perf_counter()
    directory = CaseRuns(store).run(Cell(mesh="dp2", seed=seed)).directory
    seconds = time.perf_counter() - start_s
    files = sorted(directory.glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(), seconds


def ranks_bytes() -> int:
    """Return the resident set of the largest rank, a child of this process's rank server."""
    servers = psutil.Process().children()
    return max(rank.memory_info().rss for server in servers for rank in server.children())


def open_store(directory: str, pools: Pools) -> RecordStore:
    """Return a record store with these pools."""
    version = str(torch.__version__)
    return RecordStore(Path(directory), "soak", version, defect=None, deadline_s=120.0, pools=pools)


def main() -> int:
    """Print the metrics, and write them into the document if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description="Many cells on the same ranks.")
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--write", action="store_true", help=f"put the metrics into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    digests, seconds, held = [], [], []
    with tempfile.TemporaryDirectory() as directory, Pools() as pools:
        store = open_store(directory, pools)
        for seed in range(arguments.cells):
            tensors, took_s = digest(store, seed)
            digests.append(tensors)
            seconds.append(took_s)
            held.append(ranks_bytes())
    checked = range(0, arguments.cells, FRESH_EVERY)
    with tempfile.TemporaryDirectory() as directory, Pools(isolate=True) as pools:
        fresh = open_store(directory, pools)
        differ = [seed for seed in checked if digest(fresh, seed)[0] != digests[seed]]
    tenth = max(1, arguments.cells // 10)
    first, last = statistics.median(held[1 : tenth + 1]), statistics.median(held[-tenth:])
    first_s, last_s = statistics.median(seconds[1 : tenth + 1]), statistics.median(seconds[-tenth:])
    text = (
        f"`python -m benchmarks.soak --cells {arguments.cells} --write`, torch {torch.__version__}, gloo, two ranks: "
        f"resident set of the larger rank {first / MEBI:.1f} MiB in the first tenth of the runs, {last / MEBI:.1f} MiB "
        f"in the last; "
        f"median run {first_s:.2f} s and {last_s:.2f} s; {len(checked) - len(differ)} of {len(checked)} runs have the "
        f"same bits in fresh processes."
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "soak", text)
    return int(bool(differ) or last - first >= arguments.cells * PAGE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
