"""Faults of torch written manually: `python -m benchmarks.torch_faults [--write] [NAME ...]`.

These faults are not in the catalogue of known faults (`conformance/defects`): they stand for faults that a release may
bring. Each fault changes the source of FSDP2, DTensor or clipping (`torch_faults.yaml`), from outside, by the
`sitecustomize` of the mutants. Prints the verdict of profile `pr`, up to its first failure, on the cells that are
likely to reach the fault.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.documents import PROJECT, write_block
from benchmarks.mutants import DOCUMENT, outcome, source_of
from conformance.cli.blocks import block
from conformance.defects.edits import Edit
from reference_trainer.strict_yaml import convert, load

FILE = Path(__file__).with_suffix(".yaml")


class Fault(Edit, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Edit of a module of torch, and the cells that are likely to reach it."""

    cells: str
    """Expression for --cells."""


def faults() -> dict[str, Fault]:
    """Return the faults by name."""
    return convert(load(FILE), dict[str, Fault])


def row(name: str, fault: Fault) -> list[str]:
    """Run a session with the fault; returns a row of the table.

    Raises NotInjectable if the fault does not fit the torch that is installed.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "changed.py")
        file.write_text(fault.applied(source_of(fault.target)))
        ended = outcome(f"{fault.target}:{file}", ["--profile=pr", f"--cells={fault.cells}"])
    print(f"{name}: {ended.verdict} {ended.case} {ended.reason[:120]}", flush=True)
    return [name, f"`{fault.cells}`", ended.verdict, ended.case.partition("/")[0]]


def with_earlier_rows(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """Return rows with those of the document for faults that have not been run now, in the order of the names."""
    table = block(DOCUMENT.read_text(), "faults").splitlines()
    earlier = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table if line.startswith("|")]
    by_name = {row[0]: row for row in [*earlier, *rows]}
    return [by_name[name] for name in names if name in by_name]


def main() -> None:
    """Print the table, and write it into the document if asked to."""
    parser = argparse.ArgumentParser(
        description="Verdicts of the suite on faults of torch that the catalogue does not have."
    )
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    known = faults()
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    rows = [row(name, known[name]) for name in arguments.names or known]
    if arguments.write:
        rows = with_earlier_rows(rows, list(known))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row[2] for row in rows).most_common())
    table = tabulate(rows, headers=["fault", "cells of `pr`", "verdict", "first law"], tablefmt="github")
    text = f"`python -m benchmarks.torch_faults --write`, torch {torch.__version__}: {counts}.\n\n{table}"
    print(text)
    if arguments.write:
        write_block(DOCUMENT, "faults", text)


if __name__ == "__main__":
    main()
