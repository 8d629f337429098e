"""Faulty trainers among healthy ones, at several numbers of workers: `python -m benchmarks.faults [--write]`.

Runs the session of `tests/pytest_plugin/miniatures.yaml` at `-n 0`, `-n 2` and `-n auto` and prints, for each
miniature, the verdicts of its cases, the longest time from the start of its run to the verdict, and the ranks that the
reasons blame.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.report.schema import CaseResult, Report
from tests.pytest_plugin.miniatures import BY_SEED

DOCUMENT = PROJECT / "docs" / "performance.md"
MINIATURES = "tests/pytest_plugin/miniatures"
WORKERS = ("0", "2", "auto")


def session(workers: str, directory: Path) -> list[CaseResult]:
    """Run the session of miniatures; returns the results of its cases."""
    laws = [f"conformance/laws/test_{name}.py" for name in ("par", "mem")]
    options = [
        f"--matrix={MINIATURES}.yaml",
        "--profile=miniatures",
        f"--defect={MINIATURES}.py:by_seed",
    ]
    command = [sys.executable, "-m", "pytest", f"-n{workers}", "-q", *laws, *options, f"--report-dir={directory}"]
    subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, check=False)
    return msgspec.json.decode((directory / "report.json").read_bytes(), type=Report).cases


def name_of(case: CaseResult) -> str:
    """Return the name of the miniature that a case has judged."""
    return BY_SEED[int(case.cell.partition("-seed")[2] or 0)].__name__


def blamed(case: CaseResult) -> str:
    """Return the rank that a reason blames: that which failed first, or did not wait for its peers."""
    match = re.search(r"rank (\d+) did not wait", case.reason) or re.match(r"rank (\d+) ", case.reason)
    return match[1] if match else ""


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(description="Verdicts on faulty trainers, and the time until the verdicts.")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    rows: dict[str, list[str]] = {function.__name__: [] for function in BY_SEED.values()}
    ranks: dict[str, set[str]] = {name: set() for name in rows}
    for workers in WORKERS:
        with tempfile.TemporaryDirectory() as directory:
            cases = session(workers, Path(directory, "report"))
        for name, row in rows.items():
            judged = [case for case in cases if name_of(case) == name]
            verdicts = ", ".join(dict.fromkeys(case.verdict for case in judged))
            row.append(f"{verdicts} ({max(case.run_s for case in judged):.1f} s)")
            ranks[name].update(map(blamed, judged))
    headers = ["miniature", *(f"-n {workers}" for workers in WORKERS), "rank blamed"]
    full = [[name, *row, " or ".join(sorted(ranks[name] - {""}))] for name, row in rows.items()]
    table = tabulate(full, headers=headers, tablefmt="github")
    text = f"`python -m benchmarks.faults --write`, torch {torch.__version__}, deadline 15 s:\n\n{table}"
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "faults", text)


if __name__ == "__main__":
    main()
