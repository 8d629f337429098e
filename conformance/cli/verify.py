"""`python -m conformance verify DIR`: is a report what its raw records say?

Nothing is run. Every case is judged again from the records that its session left; the lines, counts and the exit status
of the report are added up again. A verdict that rests on a run which died is compared with what is kept of that run.
"""

import datetime
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from conformance.cli.describe import law_tests
from conformance.detection.bench import judged
from conformance.judge.law import law_of
from conformance.judge.measurements import Measurement
from conformance.judge.support import release, unsupported
from conformance.judge.verdicts import INCOMPLETE, SUITE_FAILED, Verdict, exit_status
from conformance.judge.waivers import Waiver, profile_waivers, the_waiver
from conformance.plan.matrix import Case, Matrix, Profile, load_matrix
from conformance.report.cell_facts import cell_facts
from conformance.report.environment import suite_digest
from conformance.report.schema import CaseResult, Footer, Header, Report
from conformance.run.devices.hardware import Hardware, device_type
from conformance.run.record import read_failures, read_record
from conformance.run.store import RecordStore

_USAGE = 4
_NOT_JUDGED = (Verdict.NOT_RUN, Verdict.ERROR)
_DIED = (Verdict.CRASH, Verdict.TIMEOUT)


class Verification(msgspec.Struct, frozen=True):
    """What was checked, and what is wrong."""

    cases: int
    problems: list[str]

    def __str__(self) -> str:
        return "\n".join(
            [*self.problems, f"{self.cases} cases judged again from records, {len(self.problems)} problems"]
        )


def verify(directory: Path, *, matrix_file: Path, records: Path | None = None) -> Verification:
    """Check the report in a directory; `records` is where they are if they are not in it.

    Raises ValueError if there is no report, if it ends too early or cannot be read, or if it was written by another
    suite, with another matrix or with another torch than are here: then its verdicts cannot be derived again.
    """
    report, lines = _read(directory)
    _require_same_suite(report)
    matrix = load_matrix(matrix_file)
    rules, day = matrix.profile(report.profile), datetime.date.fromisoformat(report.started[:10])
    waivers = profile_waivers(matrix_file, matrix, rules, today=day)
    problems = [*_wrong_sums(report, rules), *_wrong_lines(report, lines)]
    if report.matrix_digest != matrix.digest:
        raise ValueError(f"{directory}: judged with another matrix; name it with --matrix")
    judge = _Judge(report, matrix, waivers, records or directory / "records")
    if report.cells != cell_facts(records or directory / "records", session=report.session):
        problems.append("facts of cells are not those of the records")
    for result in report.cases:
        problems += [f"{result.id}: {problem}" for problem in judge.problems(result)]
    return Verification(judge.judged, problems)


def _read(directory: Path) -> tuple[Report, list[bytes]]:
    try:
        report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
        lines = (directory / "report.jsonl").read_bytes().splitlines()
        msgspec.json.decode(lines[0], type=Header)
        msgspec.json.decode(lines[-1], type=Footer)
    except OSError as error:
        raise ValueError(f"{directory}: no report: {error}") from None
    except (msgspec.DecodeError, IndexError) as error:
        raise ValueError(f"{directory}: the report is cut off or was written by something else: {error}") from None
    return report, lines


def _require_same_suite(report: Report) -> None:
    if report.suite_digest != suite_digest():
        raise ValueError(f"written by another version of the suite ({report.suite_digest}, this is {suite_digest()})")
    theirs = report.environment["packages"]["torch"]
    if theirs != str(torch.__version__):
        raise ValueError(f"written with torch {theirs}, this is {torch.__version__}: oracles would differ")


def _wrong_sums(report: Report, rules: Profile) -> Iterator[str]:
    """Counts, completeness and exit status, from the cases."""
    counts = Counter(Verdict(result.verdict) for result in report.cases)
    if len({result.id for result in report.cases}) != len(report.cases):
        yield "a case is listed twice"
    if report.planned != len(report.cases):
        yield f"{report.planned} cases planned, {len(report.cases)} listed"
    executed = len(report.cases) - counts[Verdict.NOT_RUN]
    if report.executed != executed:
        yield f"{report.executed} cases said to be executed, {executed} are"
    if report.verdicts != {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}:
        yield f"verdicts said to be {report.verdicts}, they are {dict(counts)}"
    # What fails outside of cases makes the exit status worse, never better.
    expected = exit_status(counts, allows=rules.allows)
    if report.exit_code not in (expected, SUITE_FAILED, _USAGE, INCOMPLETE) or report.exit_code == 0 != expected:
        yield f"exit status said to be {report.exit_code}, the verdicts mean {expected}"


def _wrong_lines(report: Report, lines: list[bytes]) -> Iterator[str]:
    """report.jsonl beside report.json. What never ran has no line."""
    in_stream = {}
    for line in lines[1:-1]:
        row = msgspec.json.decode(line)
        row.pop("type")
        result = msgspec.convert(row, CaseResult)
        in_stream[result.id] = result
    for result in report.cases:
        if result.verdict not in _NOT_JUDGED and in_stream.get(result.id) != result:
            yield f"{result.id}: report.jsonl says otherwise than report.json"
    footer = msgspec.json.decode(lines[-1], type=Footer)
    if (footer.planned, footer.executed, footer.verdicts) != (report.planned, report.executed, report.verdicts):
        yield "the last line of report.jsonl says otherwise than report.json"


class _Judge:
    """Derives verdicts again."""

    def __init__(self, report: Report, matrix: Matrix, waivers: list[Waiver], records: Path) -> None:
        self.judged = 0
        self._rules = matrix.profile(report.profile)
        self._store = RecordStore(
            directory=records,
            session=report.session,
            torch_version=report.environment["packages"]["torch"],
            defect=report.defect,
            deadline_s=self._rules.deadline_s,
            replay=True,
            hardware=msgspec.convert(report.environment["hardware"], Hardware),
        )
        self._max_world_size = int(report.environment["max_world_size"])
        self._waivers = waivers
        self._cases = {case.id: case for case in matrix.cases(report.profile, seed=report.seed)}

    def problems(self, result: CaseResult) -> Iterator[str]:
        """What is wrong with one case of the report."""
        case, said = self._cases.get(result.id), Verdict(result.verdict)
        if said in _NOT_JUDGED:
            return
        if case is None:
            yield "no case of this profile"
            return
        self.judged += 1
        if said in _DIED:
            if result.reason not in self._failures(case):
                yield f"{said} because of {result.reason!r}, of which no record tells"
            return
        verdict, reason, measured = self._derived(case)
        if verdict == Verdict.PASS and said == Verdict.QUALITY_WARNING:
            verdict = said  # beside a baseline that is not at hand
        if verdict != said:
            yield f"said to be {said}, the records mean {verdict}: {reason}"
        elif not _same(measured, result.measured):
            yield f"figures said to be {result.measured}, the records give {measured}"

    def _derived(self, case: Case) -> tuple[Verdict, str, dict[str, Measurement]]:
        law = law_of(law_tests()[case.law])
        assert law is not None
        torch_version = self._store.torch_version
        hardware = self._store.hardware
        missing = unsupported(
            law,
            case.cell,
            torch_version=torch_version,
            max_world_size=self._max_world_size,
            hardware=hardware,
            profile=self._rules,
        )
        if missing:
            return Verdict.UNSUPPORTED, missing, {}
        found = judged(self._store, case)
        device = device_type(hardware.substrate(case.cell.world_size, law.substrates) or "gloo")
        waiver = the_waiver(self._waivers, case.law, case.cell, device=device, torch=release(torch_version))
        verdict, reason = waiver.judge(found.verdict, found.reason) if waiver else (found.verdict, found.reason)
        return verdict, reason, found.measured

    def _failures(self, case: Case) -> set[str]:
        """Reasons of all runs of any cell that did not end: a law may look at several cells."""
        found: set[str] = set()
        for directory in self._store.directory.iterdir():
            record = read_record(directory)
            failures = [*read_failures(directory), *([record.failure] if record and record.failure else [])]
            found.update(failure.reason for failure in failures)
        return found


def _same(measured: dict[str, Measurement], said: dict[str, Measurement]) -> bool:
    return bool(msgspec.to_builtins(measured) == msgspec.to_builtins(said))
