"""Mutants of torch, random faults: `python -m benchmarks.mutants [--count 40] [--seed 1] [--write]`.

A mutant is one small change (`torch_mutants/syntax.py`) in a module of FSDP2, tensor parallelism or clipping, at a
point that the session reaches, made from outside by a `sitecustomize` on PYTHONPATH. Prints the verdict of the
session on each mutant, up to its first failure. A mutant that survives is either no fault, since it changes nothing
that a user could notice, or a fault that no law sees: docs/blind_spots.md classifies survivors manually, and
`--write` puts the numbers of verdicts there.
"""

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tabulate import tabulate

from benchmarks.torch_mutants.syntax import Point, points, statement_at
from conformance.cli.blocks import write_block
from conformance.project import PROJECT
from conformance.report.schema import CaseResult, Report

DOCUMENT = PROJECT / "docs" / "blind_spots.md"
HOOK = Path(__file__).parent / "torch_mutants"
LIMIT_S = 1200.0
_FSDP, _DTENSOR = "torch.distributed.fsdp._fully_shard", "torch.distributed.tensor"
MODULES = (
    *(f"{_FSDP}._fsdp_{name}" for name in ("collectives", "param", "param_group", "state", "init", "common")),
    *(f"{_DTENSOR}.{name}" for name in ("_api", "_redistribute", "placement_types", "_ops._embedding_ops")),
    *(f"{_DTENSOR}.parallel.{name}" for name in ("style", "loss")),
    "torch.nn.utils.clip_grad",
)
CAUGHT = ("fail", "crash", "timeout")


class Mutant(NamedTuple):
    """Module of torch with a fault at a point."""

    module: str
    point: Point


class Outcome(NamedTuple):
    """Outcome of a session: `survived`, `nothing judged`, `no report`, or the verdict of the first case that failed."""

    verdict: str
    case: str = ""
    reason: str = ""


def source_of(module: str) -> str:
    """Return the source of a module of torch. Raises ValueError if this torch has no such module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"torch {torch.__version__} has no module {module}: see MODULES in {__file__}")
    return Path(spec.origin).read_text()


def session(change: str, selection: list[str], directory: Path, *options: str) -> None:
    """Run a session with a change of torch; its report and hits are left in the directory."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "conformance/", f"--report-dir={directory / 'report'}"]
    search = os.pathsep.join([str(HOOK), str(PROJECT)])
    environment = os.environ | {"PYTHONPATH": search, "MUTANT": change, "MUTANT_HITS": str(directory / "hits")}
    with subprocess.Popen(
        [*command, *selection, *options], cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()


def reached(selection: list[str]) -> list[Mutant]:
    """Return all mutants at points that a session with unmodified torch reaches."""
    with tempfile.TemporaryDirectory() as directory:
        session(f"{','.join(MODULES)}:hits", selection, Path(directory))
        hits = set(Path(directory, "hits").read_text().split())
    sources = {module: source_of(module) for module in MODULES}
    return [
        Mutant(module, point)
        for module, source in sources.items()
        for point in points(source)
        if f"{module}:{statement_at(source, point.line)}" in hits
    ]


def outcome(change: str, selection: list[str]) -> Outcome:
    """Return the outcome of a session up to its first failure; `change` is as in `torch_mutants/sitecustomize.py`."""
    with tempfile.TemporaryDirectory() as directory:
        session(change, selection, Path(directory), "-x")
        file = Path(directory, "report", "report.json")
        if not file.exists():
            return Outcome("no report")
        cases = msgspec.json.decode(file.read_bytes(), type=Report).cases
    ended = "survived" if any(case.verdict == "pass" for case in cases) else "nothing judged"
    return next((Outcome(case.verdict, case.id, case.reason) for case in cases if _is_noticed(case)), Outcome(ended))


def _is_noticed(case: CaseResult) -> bool:
    return case.verdict in (*CAUGHT, "error", "unexpected-pass")


def main() -> None:
    """Print the table, and write the numbers of verdicts into the document if asked to."""
    parser = argparse.ArgumentParser(description="Verdicts of the suite on small changes of torch.")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--cells", default="compile = false", help="Dynamo does not compile a module that is watched")
    parser.add_argument("--write", action="store_true", help=f"put the result into {DOCUMENT.name}")
    arguments = parser.parse_args()
    selection = [f"--profile={arguments.profile}", f"--cells={arguments.cells}"]
    all_mutants = reached(selection)
    print(f"{len(all_mutants)} mutants are reached", flush=True)
    rows: list[list[str]] = []
    for mutant in random.Random(arguments.seed).sample(all_mutants, min(arguments.count, len(all_mutants))):
        ended = outcome(f"{mutant.module}:{mutant.point.number}", selection)
        place = f"`{mutant.module.rpartition('.')[2]}:{mutant.point.line}` {mutant.point.function}"
        rows.append([place, f"`{mutant.point.change}`", ended.verdict, ended.case.partition("/")[0]])
        print(*rows[-1], ended.reason[:160], flush=True)
    counts = Counter(row[2] for row in rows)
    rows.sort(key=lambda row: (row[2], row[0]))
    headers = ["place", "change", "verdict", "first law"]
    options = f"--count {arguments.count} --seed {arguments.seed} --profile {arguments.profile}"
    text = (
        f"`python -m benchmarks.mutants {options} --write`, torch {torch.__version__}, "
        f"sampled from {len(all_mutants)} mutants: "
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}."
    )
    print(tabulate(rows, headers=headers, tablefmt="github"), text, sep="\n\n")
    if arguments.write:
        write_block(DOCUMENT, "mutants", text)


if __name__ == "__main__":
    main()
