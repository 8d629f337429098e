"""`python -m conformance verify DIR`: does a report agree with its raw records?

Nothing is run. Every case is judged again from the records that its session left; the lines, counts and the exit status
of the report are added up again. A verdict that rests on a run which died is compared with what is kept of that run.
"""

import argparse
import datetime
import importlib.metadata
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from conformance.cli.command import Answer, Commands, add_matrix
from conformance.judge.judge import Judged, judge
from conformance.judge.measurements import Measurement
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import (
    BAD,
    CONFORMANT,
    NOT_CONFORMANT,
    SUITE_FAILED,
    USAGE,
    Verdict,
    exit_status,
)
from conformance.judge.waivers import KnownFailure, profile_waivers
from conformance.plan.content import Profile
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.pytest_plugin.cases import cases_of
from conformance.report.coverage import session_coverage
from conformance.report.facts import cell_facts, suite_digest
from conformance.report.schema import CaseLine, CaseResult, Footer, Header, Report, Smallest, verdict_counts
from conformance.report.wording import counted
from conformance.run.devices.hardware import Hardware
from conformance.run.record import read_failures, read_record
from conformance.run.store import RecordStore
from reference_trainer.checks import UsageError

_NOT_JUDGED = (Verdict.NOT_RUN, Verdict.ERROR)
_DIED = (Verdict.CRASH, Verdict.TIMEOUT)


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("verify", help="derive the verdicts of a report again from its raw records")
    add_matrix(parser)
    parser.add_argument("report_dir", type=Path, metavar="DIR", help="the report's directory")
    parser.add_argument("--record-dir", type=Path, metavar="DIR", help="what --record-dir was, if it was given")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Verify a report. Raises UsageError as `verify` does."""
    verification = verify(options.report_dir, matrix_file=options.matrix, records=options.record_dir)
    return Answer(str(verification), int(bool(verification.problems)))


class Verification(msgspec.Struct, frozen=True):
    """Number of cases that were judged again, and faults of the report."""

    cases: int
    problems: list[str]

    def __str__(self) -> str:
        """Return one line for each problem, and one with the numbers of cases and problems."""
        judged = f"{counted(self.cases, 'case')} judged again from records"
        return "\n".join([*self.problems, f"{judged}, {counted(len(self.problems), 'problem')}"])


def verify(directory: Path, *, matrix_file: Path, records: Path | None = None) -> Verification:
    """Check the report in a directory; `records` is the directory of its records if they are elsewhere.

    A report none of whose cases can be judged again has that as its problem. Raises UsageError if there is no report,
    if it ends too early or cannot be read, if there is no directory `records`, or if it was written by another suite,
    with another matrix or with another torch than are here: then its verdicts cannot be derived again.
    """
    if records and not records.is_dir():
        raise UsageError(f"{records}: no directory of records; leave --record-dir out, or write the session's")
    report, stream = _read(directory)
    _require_same_suite(report)
    matrix = load_matrix(matrix_file)
    rules, day = matrix.profile(report.profile), datetime.date.fromisoformat(report.started[:10])
    waivers, _expired = profile_waivers(matrix_file, matrix, rules, today=day)
    known = [*report.accepted, *waivers]
    problems = [*_wrong_sums(report, rules), *_wrong_lines(report, stream)]
    if report.matrix_digest != matrix.digest:
        raise UsageError(f"{directory}: judged with another matrix; name it with --matrix")
    records = records or directory / "records"
    problems += _wrong_facts(report, records)
    if report.coverage != session_coverage(matrix, report.profile, report.cases, seed=report.seed):
        problems.append("the coverage is not that of the cases")
    verifier = _Verifier(report, matrix, known, records)
    for result in report.cases:
        problems += [f"{result.id}: {problem}" for problem in verifier.problems(result)]
    for smallest in report.smallest:
        if problem := verifier.problem_of_smallest(smallest):
            problems.append(f"{smallest.case}: {problem}")
    failed = {case.id for case in report.cases if case.verdict in BAD}
    located = [found.case for found in report.locations]
    problems += [f"{case}: has a first wrong place and no failure" for case in located if case not in failed]
    if not verifier.cases:
        problems.append("no case could be judged again: the report has none that was judged")
    return Verification(verifier.cases, problems)


class _Stream(msgspec.Struct, frozen=True):
    """Content of report.jsonl after its header."""

    results: list[CaseLine]
    footer: Footer


def _read(directory: Path) -> tuple[Report, _Stream]:
    try:
        report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
        header, *lines, footer = (directory / "report.jsonl").read_bytes().splitlines()
        msgspec.json.decode(header, type=Header)
        results = [msgspec.json.decode(line, type=CaseLine) for line in lines]
        return report, _Stream(results, msgspec.json.decode(footer, type=Footer))
    except OSError as error:
        raise UsageError(f"{error.filename}: no report: {error.strerror}") from None
    except ValueError as error:  # of msgspec, or of a file with fewer than two lines
        raise UsageError(f"{directory}: the report is cut off or was written by something else: {error}") from None


def _require_same_suite(report: Report) -> None:
    if report.suite_digest != suite_digest():
        raise UsageError(f"written by another version of the suite ({report.suite_digest}, this is {suite_digest()})")
    theirs, ours = report.environment["packages"]["torch"], importlib.metadata.version("torch")
    if theirs != ours:
        raise UsageError(f"written with torch {theirs}, this is {ours}: oracles would differ")


def _wrong_sums(report: Report, rules: Profile) -> Iterator[str]:
    """Counts, completeness and exit status, from the cases."""
    counts = Counter(Verdict(result.verdict) for result in report.cases)
    if len({result.id for result in report.cases}) != len(report.cases):
        yield "a case is listed twice"
    if report.planned != len(report.cases):
        yield f"{counted(report.planned, 'case')} planned, {len(report.cases)} listed"
    executed = len(report.cases) - counts[Verdict.NOT_RUN]
    if report.executed != executed:
        yield f"the report counts {counted(report.executed, 'executed case')}, its cases say {executed}"
    if report.verdicts != verdict_counts(report.cases):
        yield f"the report counts the verdicts {report.verdicts}, its cases have {dict(counts)}"
    # What fails outside of cases makes the exit status worse, never better.
    expected = exit_status(counts, allows=rules.allows)
    if expected == CONFORMANT and report.trainer and report.trainer.blind_to:
        expected = NOT_CONFORMANT
    better = report.exit_code == CONFORMANT and expected != CONFORMANT
    if better or report.exit_code not in (expected, SUITE_FAILED, USAGE):
        yield f"the report says exit status {report.exit_code}, the verdicts give {expected}"


def _wrong_facts(report: Report, records: Path) -> Iterator[str]:
    """Facts of cells that are not those of the records, or records that cannot be read."""
    try:
        if report.cells != cell_facts(records, session=report.session):
            yield "facts of cells are not those of the records"
    except msgspec.DecodeError as error:
        yield f"{records}: a record is cut off or was written by something else: {error}"


def _wrong_lines(report: Report, stream: _Stream) -> Iterator[str]:
    """Differences between report.jsonl and report.json. A case that never ran has no line."""
    in_stream = {line.id: msgspec.structs.asdict(line) for line in stream.results}
    for result in report.cases:
        if result.verdict not in _NOT_JUDGED and in_stream.get(result.id) != msgspec.structs.asdict(result):
            yield f"{result.id}: report.jsonl says otherwise than report.json"
    footer = stream.footer
    if (footer.planned, footer.executed, footer.verdicts) != (report.planned, report.executed, report.verdicts):
        yield "the last line of report.jsonl says otherwise than report.json"


class _Verifier:
    """Judges the cases of a report again from its records."""

    def __init__(self, report: Report, matrix: Matrix, known: list[KnownFailure], records: Path) -> None:
        self.cases = 0
        """Number of cases that were judged again."""
        self._matrix = matrix
        self._verdicts = {case.id: Verdict(case.verdict) for case in report.cases}
        self._profile = matrix.profile(report.profile)
        self._known = known
        self._machine = Machine(
            hardware=msgspec.convert(report.environment["hardware"], Hardware),
            torch_version=report.environment["packages"]["torch"],
            max_world_size=int(report.environment["max_world_size"]),
        )
        self._store = RecordStore(
            directory=records,
            session=report.session,
            torch_version=self._machine.torch_version,
            defect=report.defect,
            deadline_s=self._profile.deadline_s,
            replay=True,
            hardware=self._machine.hardware,
            sweep_share=self._profile.sweep_share,
            subject=report.trainer.given if report.trainer else None,
        )
        trainer = report.trainer.name if report.trainer else None
        words = shlex.split(report.selection)
        named = [case for word in words for case in cases_of(word, matrix, seed=report.seed, trainer=trainer)]
        planned = matrix.trainer_cases(trainer) if trainer else matrix.cases(report.profile, seed=report.seed)
        self._by_id = {case.id: case for case in (*named, *planned)}

    def problems(self, result: CaseResult) -> Iterator[str]:
        """Yield the faults of one case of the report."""
        case, reported = self._by_id.get(result.id), Verdict(result.verdict)
        if reported in _NOT_JUDGED:
            return
        if case is None:
            yield "no case of this profile, nor of a cell that --cells has named"
            return
        self.cases += 1
        if reported in _DIED:
            if result.reason not in self._failures():
                yield f"the report says {reported} because of {result.reason!r}, of which no record tells"
            return
        judged = self._judged(case)
        verdict = judged.verdict
        if verdict == Verdict.PASS and reported == Verdict.QUALITY_WARNING:
            verdict = reported  # compared with a baseline that is not at hand
        if verdict != reported:
            yield f"the report says {reported}, the records give {verdict}: {judged.reason}"
        elif not _same(judged.measured, result.measured):
            yield f"the report has the metrics {result.measured}, the records give {judged.measured}"

    def problem_of_smallest(self, smallest: Smallest) -> str:
        """Return the fault of a smallest failing cell, on which a law must fail as in its case; empty if there is none.

        Of a rank that died nothing can be judged again.
        """
        case = next((case for case in cases_of(smallest.cell, self._matrix) if case.law == smallest.law), None)
        reported = self._verdicts.get(smallest.case)
        if case is None or reported is None:
            return "the smallest failing cell is none of the matrix, or its case none of the report"
        verdict = self._judged(case).verdict
        if reported in (verdict, *_DIED):
            return ""
        return f"the records give {verdict} on the smallest failing cell {smallest.cell}"

    def _judged(self, case: Case) -> Judged:
        law = asserted_laws()[case.law]
        return judge(
            case,
            law.law,
            law.test,
            self._store,
            machine=self._machine,
            profile=self._profile,
            waivers=self._known,
        )

    def _failures(self) -> set[str]:
        """Reasons of all runs of any cell that did not finish: a law may look at several cells."""
        reasons: set[str] = set()
        for directory in self._store.directory.glob("*/"):
            record = read_record(directory)
            failures = [*read_failures(directory), *([record.failure] if record and record.failure else [])]
            reasons.update(failure.reason for failure in failures)
        return reasons


def _same(measured: dict[str, Measurement], reported: dict[str, Measurement]) -> bool:
    return bool(msgspec.to_builtins(measured) == msgspec.to_builtins(reported))
