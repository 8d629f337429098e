"""Differences between repetitions of one session: `python -m benchmarks.noise [--sessions 11] [--write]`.

Nothing has changed between the sessions, so that every difference is noise.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.documents import PROJECT, write_block
from conformance.report.diff import diff, read_report
from conformance.report.schema import Report

DOCUMENT = PROJECT / "docs" / "versions.md"
CELLS = "mesh in (dp2, dp2-tp2) and precision = bf16-mp or mesh = dp2-tp2 and model = deep"


def session(cells: str, directory: Path) -> Report:
    """Run a session on the selected cells; returns its report."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "conformance/", "--profile=smoke", "--cells", cells]
    subprocess.run([*command, f"--report-dir={directory}"], cwd=PROJECT, stdout=subprocess.DEVNULL, check=True)
    return read_report(directory)


def main() -> None:
    """Print the differences, and write them into the document if asked to."""
    parser = argparse.ArgumentParser(description="Differences between repetitions of one session.")
    parser.add_argument("--sessions", type=int, default=11, help="each is compared with the one before")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--write", action="store_true", help=f"put the result into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        reports = [session(arguments.cells, Path(directory, str(number))) for number in range(arguments.sessions)]
    differences = [diff(before, after).changes for before, after in pairwise(reports)]
    empty = sum(not changes for changes in differences)
    text = (
        f"`python -m benchmarks.noise --sessions {arguments.sessions} --write`, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} processors: {len(reports[0].cases)} cases on {len(reports[0].cells)} cells; "
        f"{empty} of {len(differences)} differences between a session and the next are empty."
    )
    named = sorted({f"{change.kind}: {change.reason}" for changes in differences for change in changes})
    text += "".join(f"\n- {line}" for line in named)
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "noise", text)


if __name__ == "__main__":
    main()
