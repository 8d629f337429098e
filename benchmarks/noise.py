"""The same session again and again: what does the diff say? `python -m benchmarks.noise [--sessions 11] [--write]`.

Nothing has changed between them, so that all that it names is noise.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.pages import PROJECT, write_block
from conformance.report.diff import diff, read_report
from conformance.report.schema import Report

PAGE = PROJECT / "docs" / "versions.md"
CELLS = "mesh in (dp2, dp2-tp2) and precision = bf16-mp or mesh = dp2-tp2 and model = deep"


def session(cells: str, directory: Path) -> Report:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "conformance/", "--profile=smoke", "--cells", cells]
    subprocess.run([*command, f"--report-dir={directory}"], cwd=PROJECT, stdout=subprocess.DEVNULL, check=True)
    return read_report(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Differences between sessions that are the same.")
    parser.add_argument("--sessions", type=int, default=11, help="each is compared with the one before")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--write", action="store_true", help=f"put the result into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        reports = [session(arguments.cells, Path(directory, str(number))) for number in range(arguments.sessions)]
    found = [diff(before, after).changes for before, after in pairwise(reports)]
    empty = sum(not changes for changes in found)
    text = (
        f"`python -m benchmarks.noise --sessions {arguments.sessions} --write`, torch {torch.__version__}, "
        f"{len(os.sched_getaffinity(0))} processors: {len(reports[0].cases)} cases on {len(reports[0].cells)} cells, "
        f"the same version each time; {empty} of {len(found)} differences are empty."
    )
    named = sorted({f"{one.kind}: {one.reason}" for changes in found for one in changes})
    text += "".join(f"\n- {line}" for line in named)
    print(text)
    if arguments.write:
        write_block(PAGE, "noise", text)


if __name__ == "__main__":
    main()
