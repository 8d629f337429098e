"""Verdicts of laws by schedule of a pipeline: `python -m benchmarks.laws_by_schedule REPORT_DIR [--write]`.

Reads report.json of a session with pipelines, such as `pytest -n auto conformance/ --profile nightly --cells "pp > 1"`.
An entry is the number of cells that passed, followed by the numbers of other verdicts; empty where the law judges no
cell, or has gaps.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import msgspec
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import cell_from_id
from conformance.report.schema import Report

DOCUMENT = PROJECT / "docs" / "pipelines.md"


def verdicts_by_schedule(report: Report) -> dict[tuple[str, str], Counter[str]]:
    """Return the number of cells by verdict, by law and schedule."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case in report.cases:
        cell = cell_from_id(case.cell)
        if cell.config.mesh.pp > 1:
            counts.setdefault((case.law, cell.pipeline), Counter())[case.verdict] += 1
    return counts


def entry(count: Counter[str]) -> str:
    """Return the text of an entry: `12`, or `11, 1 fail`."""
    others = [f"{number} {verdict}" for verdict, number in sorted(count.items()) if verdict != Verdict.PASS]
    return ", ".join([str(count[Verdict.PASS])] * (Verdict.PASS in count) + others)


def main() -> int:
    """Print the table, and write it into the document if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description="Verdicts of laws by schedule of a pipeline.")
    parser.add_argument("directory", type=Path, help="report directory of a session with pipelines")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    report = msgspec.json.decode((arguments.directory / "report.json").read_bytes(), type=Report)
    counts = verdicts_by_schedule(report)
    laws, schedules = (sorted({key[index] for key in counts}) for index in range(2))
    rows = [[law, *(entry(counts.get((law, schedule), Counter())) for schedule in schedules)] for law in laws]
    table = tabulate(rows, headers=["law", *schedules], tablefmt="github", disable_numparse=True)
    text = (
        f"Cells that passed in `pytest conformance/ --profile {report.profile} {report.selection}`, "
        f"torch {report.environment['packages']['torch']}:\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "laws-by-schedule", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
