"""Faults of torch written manually: `python -m benchmarks.torch_faults [--write | NAME ...]`.

These faults are not in the catalogue of known faults (`conformance/defects`): they stand for faults that a release may
bring. Each fault changes the source of FSDP2, DTensor or clipping (`torch_faults.yaml`), from outside, by the
`sitecustomize` of the mutants. Prints the verdict of profile `pr`, up to its first failure, on the cells that are
likely to reach the fault. `--write` puts the numbers of verdicts into docs/blind_spots.md.
"""

import argparse
import importlib.util
import tempfile
from collections import Counter
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.mutants import DOCUMENT, outcome
from conformance.cli.blocks import write_block
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


def source_of(module: str) -> str:
    """Return the source of a module of torch. Raises ValueError if this torch has no such module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"torch {torch.__version__} has no module {module}: see {FILE.name}")
    return Path(spec.origin).read_text()


def row(name: str, fault: Fault) -> list[str]:
    """Run a session with the fault; returns a row of the table.

    Raises NotInjectable if the fault does not fit the torch that is installed.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "changed.py")
        file.write_text(fault.applied(source_of(fault.target)))
        ended = outcome(f"{fault.target}:{file}", ["conformance/", "--profile=pr", f"--cells={fault.cells}"])
    print(f"{name}: {ended.verdict} {ended.case} {ended.reason[:120]}", flush=True)
    return [name, f"`{fault.cells}`", ended.verdict, ended.case.partition("/")[0]]


def main() -> None:
    """Print the table, and write the numbers of verdicts into the document if asked to."""
    parser = argparse.ArgumentParser(
        description="Verdicts of the suite on faults of torch that the catalogue does not have."
    )
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the result of all into {DOCUMENT.name}")
    arguments = parser.parse_args()
    known = faults()
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    if arguments.write and arguments.names:
        parser.error("--write needs all faults: name none")
    rows = [row(name, known[name]) for name in arguments.names or known]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row[2] for row in rows).most_common())
    text = f"`python -m benchmarks.torch_faults --write`, torch {torch.__version__}: {counts}."
    table = tabulate(rows, headers=["fault", "cells of `pr`", "verdict", "first law"], tablefmt="github")
    print(table, text, sep="\n\n")
    if arguments.write:
        write_block(DOCUMENT, "faults", text)


if __name__ == "__main__":
    main()
