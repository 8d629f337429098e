"""Faults of torch by hand, from outside. `python -m benchmarks.torch_faults [--write] [NAME ...]`.

Beside the catalogue of known ones (`conformance/defects`): what a release could bring that nobody has listed. Each
changes the source of FSDP2, DTensor or clipping (`torch_faults.yaml`), put in by the `sitecustomize` of the mutants.
Prints what profile `pr` says, up to its first failure, on the cells that are likely to reach the fault.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from benchmarks.mutants import PAGE, outcome, source_of
from benchmarks.pages import PROJECT, write_block
from reference_trainer.strict_yaml import load

FILE = Path(__file__).with_suffix(".yaml")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`new` where `old` stood in the source of `module`; `cells` is an expression for --cells."""

    module: str
    cells: str
    old: str
    new: str


def faults() -> dict[str, Fault]:
    return msgspec.convert(load(FILE).data, dict[str, Fault])


def changed_source(name: str, fault: Fault) -> str:
    """Raises ValueError if the fault does not fit the torch that is installed."""
    source = source_of(fault.module)
    if source.count(fault.old) != 1:
        raise ValueError(
            f"fault {name}: what it replaces stands {source.count(fault.old)} times in {fault.module} of torch "
            f"{torch.__version__}, must be once: change {FILE.name}"
        )
    return source.replace(fault.old, fault.new)


def row(name: str, fault: Fault) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "changed.py")
        file.write_text(changed_source(name, fault))
        found = outcome(f"{fault.module}:{file}", ["--profile=pr", f"--cells={fault.cells}"])
    print(f"{name}: {found.verdict} {found.case} {found.reason[:120]}", flush=True)
    return [name, f"`{fault.cells}`", found.verdict, found.case.partition("/")[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the suite says about faults of torch that are not listed.")
    parser.add_argument("names", nargs="*", help="only these (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    known = faults()
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    rows = [row(name, known[name]) for name in arguments.names or known]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row[2] for row in rows).most_common())
    table = tabulate(rows, headers=["fault", "cells of `pr`", "verdict", "first law"], tablefmt="github")
    text = f"`python -m benchmarks.torch_faults --write`, torch {torch.__version__}: {counts}.\n\n{table}"
    print(text)
    if arguments.write:
        write_block(PAGE, "faults", text)


if __name__ == "__main__":
    main()
