"""Cases that reach a line of torch, from sessions with unmodified torch that measure its coverage."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Set
from pathlib import Path

import msgspec

from benchmarks.torch_mutants.judged_records import FILE, JudgedRecords
from conformance.project import PROJECT
from conformance.report.schema import read_report
from conformance.run.record import read_record
from conformance.torch_coverage.seen import seen_in_records

OPTIONS = ("--profile=pr", "--cells=compile = false")  # inductor takes longest, and reaches nothing else of torch
SELECTIONS = ("--budget=60s", "--laws=API-3,CKPT-6,DT-3,TP-2")
"""Selections of the sessions: the best cells, and the laws with the most samples, whose cells come late."""
PLUGIN = "benchmarks.torch_mutants.judged_records"
KEPT_FILE = "cases.msgpack"


class Case(msgspec.Struct, frozen=True):
    """Case that unmodified torch passes."""

    nodeid: str
    law: str
    records: frozenset[str]
    """Names of the records that its law has asked for."""
    seconds: float
    """Duration without the runs."""


class Cases(msgspec.Struct):
    """Cases of the sessions, with the runs that they judge."""

    options: tuple[str, ...]
    """Options of the sessions, with which each case can be run again."""
    cases: list[Case]
    seconds: dict[str, float]
    """Duration of the run of each record."""
    reached: dict[str, dict[str, frozenset[int]]]
    """Lines by file of torch by record."""

    def lines(self, file: str) -> Set[int]:
        """Return the lines of a file of torch that any case reaches."""
        return frozenset().union(*(files.get(file, frozenset()) for files in self.reached.values()))

    def selected(self, file: str, lines: Set[int], *, limit_s: float) -> list[str]:
        """Return the node ids of cases that reach one of the lines, up to a total time: the cheapest of each law first.

        A run that several of them judge counts once. The first case is taken whatever it costs.
        """
        records = {record for record, files in self.reached.items() if lines & files.get(file, frozenset())}
        chosen: list[str] = []
        made: set[str] = set()
        total_s = 0.0
        for case in self._in_rounds([case for case in self.cases if case.records & records]):
            seconds = case.seconds + sum(self.seconds[record] for record in case.records - made)
            if not chosen or total_s + seconds <= limit_s:
                chosen.append(case.nodeid)
                made |= case.records
                total_s += seconds
        return chosen

    def _in_rounds(self, cases: list[Case]) -> Iterator[Case]:
        """Yield the cheapest case of each law, then the second of each, and so on."""
        by_law: dict[str, list[Case]] = defaultdict(list)
        for case in sorted(cases, key=self._cost):
            by_law[case.law].append(case)
        for each_round in itertools.zip_longest(*by_law.values()):
            yield from sorted(filter(None, each_round), key=self._cost)

    def _cost(self, case: Case) -> float:
        return case.seconds + sum(self.seconds[record] for record in case.records)


def read_cases(directory: Path) -> Cases:
    """Return the cases that a directory keeps, from sessions now if it keeps none."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / KEPT_FILE
    if not file.exists():
        cases = Cases(OPTIONS, [], {}, {})
        for selection in SELECTIONS:
            with tempfile.TemporaryDirectory() as report:
                _run(selection, report)
                add(cases, Path(report))
        file.write_bytes(msgspec.msgpack.encode(cases))
    return msgspec.msgpack.decode(file.read_bytes(), type=Cases)


def _run(selection: str, report: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "conformance/", "-p", PLUGIN]
    options = [*OPTIONS, selection, "--torch-coverage", f"--report-dir={report}"]
    subprocess.run([*command, *options], cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(PROJECT)}, check=True)


def add(cases: Cases, report: Path) -> None:
    """Add the cases of a session that have passed, and the lines that their records have reached."""
    judged = {result.nodeid: result for result in read_report(report).cases if result.verdict in ("pass", "waived")}
    known = {case.nodeid for case in cases.cases}
    for line in (report / FILE).read_bytes().splitlines():
        each = msgspec.json.decode(line, type=JudgedRecords)
        if each.nodeid in judged and each.nodeid not in known:
            result = judged[each.nodeid]
            seconds = result.duration_s - result.run_s - result.wait_s
            cases.cases.append(Case(each.nodeid, result.law, frozenset(each.records), seconds))
            for record in set(each.records) - cases.reached.keys():
                _add_record(cases, report / "records", record)


def _add_record(cases: Cases, directory: Path, record: str) -> None:
    content = read_record(directory / record)
    cases.seconds[record] = content.run_s if content is not None else 0.0
    cases.reached[record] = {
        file: frozenset(line for jump in jumps for line in jump if line > 0)
        for file, jumps in seen_in_records(directory, [record]).jumps.items()
    }
