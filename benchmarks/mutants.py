"""Mutants of torch: faults nobody has thought of. `python -m benchmarks.mutants [--count 40] [--seed 1] [--write]`.

One small change (`torch_mutants/syntax.py`) at a time in a module that FSDP2, tensor parallelism or clipping is made
of, at a place that the session reaches, from outside: by a `sitecustomize` on PYTHONPATH. Prints for each what the
session says, up to its first failure. A mutant that survives is either no fault, since it changes nothing that a user
could notice, or one that no law sees: which of the two has to be judged manually, in docs/detection/torch_faults.md.
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

from benchmarks.pages import PROJECT, write_block
from benchmarks.torch_mutants.syntax import Point, points, statement_at
from conformance.report.schema import CaseResult, Report

PAGE = PROJECT / "docs" / "detection" / "torch_faults.md"
HOOK = Path(__file__).parent / "torch_mutants"
LIMIT_S = 1200.0
_FSDP, _DTENSOR = "torch.distributed.fsdp._fully_shard", "torch.distributed.tensor"
MODULES = (
    *(f"{_FSDP}._fsdp_{part}" for part in ("collectives", "param", "param_group", "state", "init", "common")),
    *(f"{_DTENSOR}.{part}" for part in ("_api", "_redistribute", "placement_types", "_ops._embedding_ops")),
    *(f"{_DTENSOR}.parallel.{part}" for part in ("style", "loss")),
    "torch.nn.utils.clip_grad",
)
CAUGHT = ("fail", "crash", "timeout")


class Mutant(NamedTuple):
    module: str
    point: Point


class Outcome(NamedTuple):
    """How a session ended: `survived`, `no report`, or the verdict of the first case that was not well."""

    verdict: str
    case: str = ""
    reason: str = ""


def source_of(module: str) -> str:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"torch {torch.__version__} has no module {module}: see MODULES in {__file__}")
    return Path(found.origin).read_text()


def session(change: str, selection: list[str], directory: Path, *options: str) -> None:
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
    """All mutants of what a session of the unmodified torch runs through."""
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
    """What a session says up to its first failure, with a change as `torch_mutants/sitecustomize.py` takes it."""
    with tempfile.TemporaryDirectory() as directory:
        session(change, selection, Path(directory), "-x")
        file = Path(directory, "report", "report.json")
        if not file.exists():
            return Outcome("no report")
        cases = msgspec.json.decode(file.read_bytes(), type=Report).cases
    return next(
        (Outcome(case.verdict, case.id, case.reason) for case in cases if _is_noticed(case)), Outcome("survived")
    )


def _is_noticed(case: CaseResult) -> bool:
    return case.verdict in (*CAUGHT, "error", "unexpected-pass")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the suite says about small changes of torch.")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--cells", default="compile = false", help="Dynamo does not compile a module that is watched")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    arguments = parser.parse_args()
    selection = [f"--profile={arguments.profile}", f"--cells={arguments.cells}"]
    all_mutants = reached(selection)
    print(f"{len(all_mutants)} mutants are reached", flush=True)
    rows: list[list[str]] = []
    for mutant in random.Random(arguments.seed).sample(all_mutants, min(arguments.count, len(all_mutants))):
        found = outcome(f"{mutant.module}:{mutant.point.number}", selection)
        place = f"`{mutant.module.rpartition('.')[2]}:{mutant.point.line}` {mutant.point.function}"
        rows.append([place, f"`{mutant.point.change}`", found.verdict, found.case.partition("/")[0]])
        print(*rows[-1], found.reason[:160], flush=True)
    counts = Counter(row[2] for row in rows)
    rows.sort(key=lambda row: (row[2], row[0]))
    headers = ["place", "change", "verdict", "first law"]
    options = f"--count {arguments.count} --seed {arguments.seed} --profile {arguments.profile}"
    text = (
        f"`python -m benchmarks.mutants {options} --write`, torch {torch.__version__}, "
        f"{len(all_mutants)} mutants to draw from: "
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}.\n\n"
        + tabulate(rows, headers=headers, tablefmt="github")
    )
    print(text)
    if arguments.write:
        write_block(PAGE, "mutants", text)


if __name__ == "__main__":
    main()
