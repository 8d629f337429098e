"""Time and memory of sessions of 10, 100 and 1000 cases: `python -m benchmarks.growth [--write]`."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block

DOCUMENT = PROJECT / "docs" / "performance.md"
LAWS = ("PAR-1", "OPT-1", "MP-3", "INIT-1", "RS-1")
SIZES = (10, 100, 1000)
MEBI = 1 << 20


def matrix(cases: int) -> str:
    """Return the text of a matrix on which `LAWS` have this number of cases."""
    seeds = list(range(cases // len(LAWS)))
    return (
        "schema: 2\naxes: {mesh: [dp1]}\n"
        f"cells:\n  growth: {{note: one cell, axes: {{mesh: [dp1], seed: {seeds}}}}}\n"
        "profiles:\n  growth: {note: all, must: [growth], deadline_s: 60}\n"
    )


def session(cases: int, directory: Path) -> tuple[float, float, float]:
    """Run a session; returns seconds, peak MiB of pytest's process, and MiB added in the second half of the time."""
    file = directory / "matrix.yaml"
    file.write_text(matrix(cases))
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "conformance/", f"--matrix={file}", "--profile=growth"]
    command += [f"--laws={','.join(LAWS)}", f"--report-dir={directory / 'report'}"]
    start_s = time.perf_counter()
    process = psutil.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    held = []
    while process.poll() is None:
        held.append(process.memory_info().rss / MEBI)
        time.sleep(0.1)
    if process.returncode != 0:
        raise RuntimeError(f"the session of {cases} cases ended with {process.returncode}")
    return time.perf_counter() - start_s, max(held), max(held) - max(held[: len(held) // 2])


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="Time and memory of sessions by their number of cases.")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    rows = []
    for cases in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            seconds, held, added = session(cases, Path(directory))
        rows.append([cases, f"{seconds:.1f}", f"{seconds / cases * 1000:.0f}", f"{held:.0f}", f"{added:.0f}"])
        print(*rows[-1], flush=True)
    headers = ["cases", "seconds", "ms per case", "MiB of pytest's process", "of these, in the second half"]
    text = f"`python -m benchmarks.growth --write`, torch {torch.__version__}, one worker:\n\n" + tabulate(
        rows, headers=headers, tablefmt="github"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "growth", text)


if __name__ == "__main__":
    main()
