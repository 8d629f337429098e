"""Mutants of torch, random faults: `python -m benchmarks.mutants OUT [--count 60] [--seed 1] [--write]`.

A mutant is one small change (`torch_mutants/syntax.py`) in a module of torch whose coverage the suite measures, made
from outside by a `sitecustomize` on PYTHONPATH. Sessions with unmodified torch tell which cases reach a statement: a
mutant is judged by these alone, the cheapest of each law first, up to the first failure. A mutant that survives is
either no fault, since it changes nothing that a user could notice, or a fault that no law sees: docs/blind_spots.md
classifies survivors manually, and `--write` puts the numbers of verdicts there.

OUT keeps what cases reach and, for each seed, the outcomes: a run goes on where an earlier one ended.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from benchmarks.torch_mutants.reaching_cases import Cases, read_cases
from benchmarks.torch_mutants.syntax import Point, points, statement_at
from conformance.cli.blocks import write_block
from conformance.project import PROJECT
from conformance.report.schema import CaseResult, Report
from conformance.torch_coverage.areas import area_of_files, torch_directory

DOCUMENT = PROJECT / "docs" / "blind_spots.md"
HOOK = Path(__file__).parent / "torch_mutants"
SESSION_LIMIT_S = 900.0
DEADLINE_S = 90
"""Time limit of the runs of a case with a mutant, some of which hang; the longest takes half of it."""
CAUGHT = ("fail", "crash", "timeout")


class Mutant(msgspec.Struct, frozen=True):
    """File of torch, below its directory, with a fault at a point, and the lines that reach it."""

    file: str
    point: Point
    lines: frozenset[int]

    @property
    def change(self) -> str:
        """Value of `MUTANT` for the hook."""
        return f"{module_of(self.file)}:{self.point.number}"


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a session: `survived`, `nothing judged`, `no report`, or the verdict of the first case that failed."""

    verdict: str
    case: str = ""
    reason: str = ""


class Judged(msgspec.Struct, frozen=True):
    """Mutant with its outcome, and how many cases have judged it if none failed."""

    mutant: Mutant
    outcome: Outcome
    cases: int


def module_of(file: str) -> str:
    """Return the name of the module of a file below torch's directory."""
    return f"torch.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


def session(change: str, selection: list[str], directory: Path, *options: str) -> None:
    """Run a session with a change of torch; its report is left in the directory."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", f"--report-dir={directory / 'report'}"]
    search = os.pathsep.join([str(HOOK), str(PROJECT)])
    environment = os.environ | {"PYTHONPATH": search, "MUTANT": change}
    with subprocess.Popen(
        [*command, *selection, *options], cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        try:
            process.wait(SESSION_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()


def mutants(reached: Cases) -> list[Mutant]:
    """Return all mutants of torch at points in functions that a case reaches."""
    found = []
    for file in area_of_files():
        lines = reached.lines(file)
        source = (torch_directory() / file).read_text() if lines else ""
        for point in points(source):
            own = frozenset({point.line, statement_at(source, point.line)})
            if own & lines:
                found.append(Mutant(file, point, own))
    return found


def outcome(change: str, selection: list[str]) -> Outcome:
    """Return the outcome of a session up to its first failure; `change` is as in `torch_mutants/sitecustomize.py`."""
    with tempfile.TemporaryDirectory() as directory:
        session(change, selection, Path(directory), "-x", "--shrink=0", "--explain=0")
        file = Path(directory, "report", "report.json")
        if not file.exists():
            return Outcome("no report")
        cases = msgspec.json.decode(file.read_bytes(), type=Report).cases
    ended = "survived" if any(case.verdict in ("pass", "waived") for case in cases) else "nothing judged"
    return next((Outcome(case.verdict, case.id, case.reason) for case in cases if _is_noticed(case)), Outcome(ended))


def _is_noticed(case: CaseResult) -> bool:
    return case.verdict in (*CAUGHT, "error", "unexpected-pass")


def judged(mutant: Mutant, reached: Cases, *, limit_s: float) -> Judged:
    """Return a mutant with the outcome of the cases that reach it."""
    nodeids = reached.selected(mutant.file, mutant.lines, limit_s=limit_s)
    with tempfile.TemporaryDirectory() as directory:
        arguments = Path(directory, "cases")
        arguments.write_text("\n".join(nodeids))
        ended = outcome(mutant.change, [f"@{arguments}", *reached.options, f"--deadline={DEADLINE_S}"])
        return Judged(mutant, ended, len(nodeids))


def all_judged(out: Path, reached: Cases, sample: list[Mutant], *, limit_s: float) -> list[Judged]:
    """Return the mutants of a sample with their outcomes, of which the file `out` keeps those that it has."""
    results = msgspec.json.decode(out.read_bytes(), type=list[Judged]) if out.exists() else []
    known = {result.mutant for result in results}
    for mutant in sample:
        if mutant not in known:
            results.append(judged(mutant, reached, limit_s=limit_s))
            out.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
            print(*row(results[-1]), results[-1].outcome.reason[:160], flush=True)
    return [result for result in results if result.mutant in sample]


def row(result: Judged) -> list[str]:
    """Return the row of a mutant in the table."""
    mutant, ended = result.mutant, result.outcome
    place = f"`{mutant.file.removeprefix('distributed/')}:{mutant.point.line}` {mutant.point.function}"
    by = ended.case.partition("/")[0] or f"{result.cases} cases"
    return [place, f"`{mutant.point.change}`", ended.verdict, by]


def main() -> None:
    """Print the table, and write the numbers of verdicts into the document if asked to."""
    parser = argparse.ArgumentParser(description="Verdicts of the suite on small changes of torch.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of what cases reach, and of outcomes")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of the cases that judge a mutant")
    parser.add_argument("--write", action="store_true", help=f"put the result into {DOCUMENT.name}")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    reached = read_cases(out)
    all_mutants = mutants(reached)
    print(f"{len(all_mutants)} mutants are reached", flush=True)
    sample = random.Random(arguments.seed).sample(all_mutants, min(arguments.count, len(all_mutants)))
    kept = out / f"outcomes-{arguments.seed}.json"
    results = all_judged(kept, reached, sample, limit_s=arguments.limit)
    counts = Counter(result.outcome.verdict for result in results)
    rows = sorted(map(row, results), key=lambda row: (row[2], row[0]))
    text = (
        f"`python -m benchmarks.mutants OUT --count {arguments.count} --seed {arguments.seed} --write`, "
        f"torch {torch.__version__}, sampled from {len(all_mutants)} mutants: "
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}."
    )
    headers = ["place", "change", "verdict", "first law"]
    print(tabulate(rows, headers=headers, tablefmt="github"), text, sep="\n\n")
    if arguments.write:
        write_block(DOCUMENT, "mutants", text)


if __name__ == "__main__":
    main()
