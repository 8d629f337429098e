"""Time of a session by its number of workers: `python -m benchmarks.workers [--workers 0 2 auto] [--write]`.

`-n auto` should be the fastest on every machine. `taskset` simulates fewer processors.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.report.schema import Report

DOCUMENT = PROJECT / "docs" / "performance.md"
WORKERS = ("0", "1", "2", "3", "4", "auto")


def session(workers: str, profile: str, directory: Path) -> tuple[float, Report]:
    """Run a session; returns its seconds and its report."""
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "-q", "conformance/", f"--profile={profile}"]
    start_s = time.perf_counter()
    subprocess.run([*command, f"--report-dir={directory}"], cwd=PROJECT, stdout=subprocess.DEVNULL, check=True)
    took_s = time.perf_counter() - start_s
    return took_s, msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="Seconds of a session by its number of workers.")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--workers", nargs="+", default=WORKERS)
    parser.add_argument("--reports", type=Path, metavar="DIR", help="keep the report of each session in DIR/WORKERS")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    rows = []
    for workers in arguments.workers:
        with tempfile.TemporaryDirectory() as scratch:
            took_s, report = session(workers, arguments.profile, (arguments.reports or Path(scratch)) / workers)
        waited_s = sum(case.wait_s for case in report.cases)
        rows.append([f"-n {workers}", f"{took_s:.0f}", f"{waited_s:.0f}"])
        print(*rows[-1], flush=True)
    table = tabulate(rows, headers=["workers", "seconds", "of which cases waited"], tablefmt="github")
    text = (
        f"Profile `{arguments.profile}`, {report.planned} cases, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} processors:\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "workers", text)


if __name__ == "__main__":
    main()
