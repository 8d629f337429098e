"""Mutants of the suite, which its own tests should kill: `python -m benchmarks.suite_mutants OUT [--tests COMMIT]`.

A mutant is one small change in the code that judges: laws, oracles, assertions, judge, report and selection. Each is
put into a copy of the last commit, in which the tests that reach its line run, fast ones first, up to the first that
fails. `--tests` takes the tests from another commit, to compare them on the same mutants.

OUT keeps the coverage of the tests without a mutant and, in `mutants.json`, the outcomes: a run goes on where an
earlier one ended. Needs pytest-cov. Neither mutmut nor cosmic-ray fits: mutmut renames functions, and the suite reads
its own source; cosmic-ray runs all tests for each mutant.
"""

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from coverage import CoverageData

from benchmarks.torch_mutants.syntax import mutated, points, statement_at
from conformance.project import PROJECT

MUTATED = (
    *(f"conformance/{package}" for package in ("laws", "oracles", "judge", "assertions", "report")),
    "conformance/plan/selection.py",
)
FOLDERS = ("tests/fast", "tests/ranks")
"""Folders of tests, in the order in which they try a mutant. Sessions run in processes without coverage."""
SESSIONS = "tests/sessions/pytest_plugin/test_session.py"
"""Tests of sessions, which try the survivors outside of laws, assertions and oracles."""
LIMIT_S = 60.0
"""Seconds of tests that try a mutant in a folder, quick ones first, by how long they took without a mutant."""
OPTIONS = ("-q", "-o", "junit_family=xunit1", "-p", "no:cacheprovider")


class Mutant(msgspec.Struct, frozen=True):
    """Point in a file of the suite with a fault, the lines of its statement, and whether these run at import."""

    file: str
    number: int
    change: str
    lines: tuple[int, int]
    is_imported: bool


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a mutant: `killed`, `survived` or `not reached`, and the first test that failed."""

    mutant: Mutant
    outcome: str
    test: str = ""


class Result(msgspec.Struct, frozen=True):
    """Result of a test."""

    passed: bool
    seconds: float


@dataclass(frozen=True)
class Tests:
    """Tests of a folder that pass without a mutant, and the lines of the suite that each reaches."""

    folder: str
    results: dict[str, Result]
    lines: dict[str, dict[int, set[str]]]
    """Tests by line by file."""

    def selected(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach a mutant, quick ones first, up to a total time of `LIMIT_S`.

        A line that runs when its module is imported is reached by all tests of the module.
        """
        lines = self.lines.get(mutant.file, {})
        reaching = [lines.get(line, set()) for line in (lines if mutant.is_imported else mutant.lines)]
        chosen, total_s = [], 0.0
        for test in sorted(set().union(*reaching) & self.results.keys(), key=lambda test: self.results[test].seconds):
            total_s += self.results[test].seconds
            if self.results[test].passed and total_s < LIMIT_S:
                chosen.append(test)
        return chosen


def checkout(directory: Path, tests: str | None) -> None:
    """Put the files of the last commit into a directory, with the tests of another commit if one is given."""
    for commit, paths in [("HEAD", []), *([(tests, ["tests"])] if tests else [])]:
        if paths:
            subprocess.run(["rm", "-r", *paths], cwd=directory, check=True)
        with subprocess.Popen(["git", "archive", commit, *paths], cwd=PROJECT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x"], cwd=directory, stdin=archive.stdout, check=True)
    (directory / "tests" / "durations.json").write_text("{}")  # tests run in the order in which they are named


def run_tests(tree: Path, selected: Iterable[str], results: Path, *options: str, limit_s: float) -> dict[str, Result]:
    """Run tests in a tree; returns their results by id. A run that does not end has one, which has not passed."""
    arguments = results.with_suffix(".args")
    arguments.write_text("\n".join(selected))
    command = [sys.executable, "-m", "pytest", f"@{arguments}", *OPTIONS, f"--junitxml={results}", *options]
    path = os.pathsep.join([str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])  # for `pytest` itself
    environment = os.environ | {"PYTHONPATH": path}
    with (
        results.with_suffix(".out").open("wb") as output,
        subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"no end": Result(passed=False, seconds=limit_s)}
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return {f"status {status} of pytest": Result(passed=False, seconds=0.0)}
    return read_results(results)


def read_results(file: Path) -> dict[str, Result]:
    """Return the results in a JUnit file by pytest's id of the test; a test that is skipped has not passed."""
    return {
        f"{case.get('file')}::{case.get('name')}": Result(len(case) == 0, float(case.get("time", 0)))
        for case in ElementTree.parse(file).iter("testcase")
    }


def tests_of(folder: str, tree: Path, kept: Path) -> Tests:
    """Return the tests of a folder as they are without a mutant, from a run that is kept in a directory."""
    name = kept / folder.replace("/", "-")
    data, results = name.with_suffix(".coverage"), name.with_suffix(".xml")
    if not results.exists():
        settings = kept / "coveragerc"
        include = "".join(f"\n  {path if path.endswith('.py') else f'{path}/*'}" for path in MUTATED)
        settings.write_text(f"[run]\ndata_file = {data}\nrelative_files = True\ninclude = {include}\n")
        options = ("--cov", "--cov-context=test", "--cov-report=", f"--cov-config={settings}", "-n1")
        run_tests(tree, [folder], results, *options, limit_s=3600.0)
    coverage = CoverageData(str(data))
    coverage.read()
    lines = {
        file: {
            line: {context.partition("|")[0] for context in contexts}
            for line, contexts in coverage.contexts_by_lineno(file).items()
        }
        for file in coverage.measured_files()
    }
    return Tests(folder, read_results(results), lines)


def mutants(tree: Path) -> list[Mutant]:
    """Return all mutants of the suite in a tree."""
    found = []
    for path in MUTATED:
        for file in sorted((tree / path).rglob("*.py")) or [tree / path]:
            source = file.read_text()
            bodies = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
            for point in points(source, in_judgement=True):
                inside = any(node.lineno <= point.line <= (node.end_lineno or 0) for node in bodies)
                lines = (statement_at(source, point.line), point.line)
                name = str(file.relative_to(tree))
                found.append(Mutant(name, point.number, point.change, lines, not inside))
    return found


def sessions(mutant: Mutant) -> list[str]:
    """Return the tests of sessions that try a mutant."""
    return (
        []
        if mutant.file.startswith(("conformance/laws/", "conformance/assertions/", "conformance/oracles/"))
        else [SESSIONS]
    )


def outcome(mutant: Mutant, folders: Sequence[Tests], commit: str | None) -> Outcome:
    """Return the outcome of a mutant, from tests in a separate tree."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        tree.mkdir()
        checkout(tree, commit)
        file = tree / mutant.file
        file.write_text(ast.unparse(mutated(file.read_text(), mutant.number, in_judgement=True)))
        tried = False
        for selected in [*(tests.selected(mutant) for tests in folders), sessions(mutant)]:
            if selected:
                tried = True
                results = run_tests(tree, selected, Path(directory, "results.xml"), "-x", limit_s=60 + 5 * LIMIT_S)
                failed = [test for test, result in results.items() if not result.passed]
                if failed:
                    return Outcome(mutant, "killed", failed[0])
    return Outcome(mutant, "survived" if tried else "not reached")


def main() -> None:
    """Print the outcomes of a sample of mutants and how many are killed."""
    parser = argparse.ArgumentParser(description="Small changes of the suite that its tests kill.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of coverage and outcomes")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--tests", metavar="COMMIT", help="commit of the tests, by default the last")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        checkout(Path(directory), arguments.tests)
        folders = [tests_of(folder, Path(directory), out) for folder in FOLDERS]
        sample = mutants(Path(directory))
    file = out / "mutants.json"
    outcomes = msgspec.json.decode(file.read_bytes(), type=list[Outcome]) if file.exists() else []
    random.Random(arguments.seed).shuffle(sample)
    finished = {each.mutant for each in outcomes}
    for mutant in sample[: arguments.count]:
        if mutant not in finished:
            outcomes.append(outcome(mutant, folders, arguments.tests))
            file.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
            place = f"{mutant.file}:{mutant.lines[1]}"
            print(place, mutant.change, outcomes[-1].outcome, outcomes[-1].test, sep="; ", flush=True)
    print(Counter(each.outcome for each in outcomes))


if __name__ == "__main__":
    main()
