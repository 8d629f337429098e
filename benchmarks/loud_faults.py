"""Outcomes of calls that differ on one rank: `python -m benchmarks.loud_faults [--write | CALL ...]`.

Prints how each call of `conformance.sweeps.loud_faults` ends with the installed torch. `--write` keeps the outcomes,
with which law LOUD-1 compares those of a session, and writes docs/loud_faults.md for all versions.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from conformance.cli.reports import as_json
from conformance.project import PROJECT
from conformance.sweeps.loud_faults import CALLS, RECORDED_FILE, LoudFault, made, markdown, recorded, recorded_of
from conformance.sweeps.rank_trials import OddCall, RankTrials
from conformance.torch_release import release

DOCUMENT = PROJECT / "docs" / "loud_faults.md"


def measured(calls: Mapping[str, OddCall], *, size: int) -> list[LoudFault]:
    """Make the calls on new ranks; one that ends worse than recorded is repeated with the longer time limit."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(rank, size, Path(directory), calls)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        return msgspec.json.decode(Path(directory, "found").read_bytes(), type=list[LoudFault])


def _rank(rank: int, size: int, directory: Path, calls: Mapping[str, OddCall]) -> None:
    torch.set_num_threads(1)
    found = made(RankTrials(rank, size, directory), calls, recorded_of(torch.__version__))
    if rank == 0:
        Path(directory, "found").write_bytes(msgspec.json.encode(found))


def main() -> None:
    """Print the outcomes, and keep them if asked to."""
    parser = argparse.ArgumentParser(description="How calls end that differ on one rank.")
    parser.add_argument("names", nargs="*", metavar="CALL", help="only these (default: all)")
    parser.add_argument("--write", action="store_true", help=f"keep the outcomes, and write {DOCUMENT.name}")
    arguments = parser.parse_args()
    known = {name for calls in CALLS.values() for name in calls}
    if unknown := set(arguments.names) - known:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    asked = set(arguments.names) or known
    chosen = {size: {name: call for name, call in calls.items() if name in asked} for size, calls in CALLS.items()}
    found = [each for size, calls in chosen.items() for each in (measured(calls, size=size) if calls else [])]
    rows = [[each.call, each.outcome, *(f"{end.end}: {end.text[:70]}" for end in each.ends)] for each in found]
    print(tabulate(rows, headers=["call", "outcome", *(f"rank {rank}" for rank in range(max(chosen)))]))
    if arguments.write:
        version = torch.__version__.partition("+")[0]
        outcomes = recorded().get(version, {}) | {each.call: each.outcome for each in found}
        versions = {**recorded(), version: {name: outcome for name, outcome in outcomes.items() if name in known}}
        kept = {each: versions[each] for each in sorted(versions, key=release)}
        RECORDED_FILE.write_text(as_json(kept) + "\n")
        DOCUMENT.write_text(markdown(kept))


if __name__ == "__main__":
    main()
