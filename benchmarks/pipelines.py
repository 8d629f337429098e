"""Traffic and activations of pipelines by schedule and reshard mode: `python -m benchmarks.pipelines [--write]`.

Runs each cell of `SECTIONS` of matrix.yaml on real ranks, with both reshard modes if it can. Counts are those of a step
of the first rank: gathers and reductions of its groups, tensors that it sends, and the most micro-batches of which a
stage holds activations.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from conformance.instruments.facts import RankFacts
from conformance.plan.cells import Cell
from conformance.plan.matrix import load_matrix
from conformance.project import data_file
from conformance.run.case_runs import CaseRuns
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DOCUMENT = PROJECT / "docs" / "pipelines.md"
STEP = 1
SECTIONS = ("pipeline-plain", "pipeline-schedules")


def row(cell: Cell, facts: RankFacts) -> list[object]:
    """Return the row of a cell, from the facts of one rank."""
    events = [e for e in facts.collectives if e.step == STEP and e.group == "dp_shard"]
    gathered = [e.nbytes for e in events if e.kind == "all_gather"]
    reduced = [e.nbytes for e in events if e.kind == "reduce_scatter"]
    sent = [t for t in facts.transfers if (t.step, t.direction) == (STEP, "send")]
    held = max(len(a.held) for a in facts.stage_actions if a.step == STEP)
    return [cell.pipeline, cell.reshard, len(gathered), sum(gathered), len(reduced), sum(reduced), len(sent), held]


def main() -> int:
    """Print the table, and write it into the document if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(description="Traffic and activations of pipelines by schedule and reshard mode.")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    matrix = load_matrix(data_file("matrix.yaml"))
    schedules = [planned.cell for planned in matrix.planned if planned.section in SECTIONS]
    wanted = [cell.but(reshard=mode) for cell in schedules for mode in ("default", "always")]
    cells = [cell for cell in wanted if not any(exclusion.selection(cell) for exclusion in matrix.exclusions)]
    with tempfile.TemporaryDirectory() as directory, Pools(share_processors=False) as pools:
        store = RecordStore(
            Path(directory), "pipelines", str(torch.__version__), defect=None, deadline_s=120.0, pools=pools
        )
        rows = [row(cell, CaseRuns(store).run(cell).ranks[0]) for cell in cells]
    headers = [
        "schedule",
        "reshard",
        "all-gathers",
        "bytes gathered",
        "reduce-scatters",
        "bytes reduced",
        "tensors sent",
        "micro-batches held by a stage",
    ]
    table = tabulate(sorted(rows, key=str), headers=headers, tablefmt="github")
    text = (
        f"`python -m benchmarks.pipelines`, torch {torch.__version__}, step {STEP} on rank 0 of {cells[0].mesh}:"
        f"\n\n{table}"
    )
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "pipelines", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
