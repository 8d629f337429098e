"""Coverage of a session, and coverage in words and tables."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from conformance.judge.verdicts import Verdict
from conformance.plan.coverage import Coverage, LawCoverage, Tally, coverage
from conformance.plan.matrix import Matrix
from conformance.report.schema import CaseResult
from conformance.report.wording import share_text

_HAVE_JUDGED = (Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.WAIVED, Verdict.FAIL, Verdict.UNEXPECTED_PASS)
"""Verdicts of a law on a run that has ended."""

_CHAPTERS = ("interfaces", "memory", "numerics", "schedule", "state")
"""Chapters of laws on numbers, memory, traffic or state: all but preconditions, options of the suite and trainers."""
_PENDING = "unsupported, not selected, or without a result"
TOTAL_HEADERS = ["combinations", "share", "seen", "possible"]
AXIS_HEADERS = ["axis", "pairs", "seen", "possible", "triples", "seen", "possible"]
LAW_HEADERS = ["law", "pairs", "cells", "judged", "share", "not judged", "where", "reason"]


def session_coverage(matrix: Matrix, profile: str, cases: Iterable[CaseResult], *, seed: int = 0) -> Coverage:
    """Return the coverage of a session: the share of the profile's combinations that its cases have judged.

    All cells of the profile are possible, however few the session has selected. Cells beyond it, which a larger budget
    adds, count once they are judged. `seed` is the number that was added to the seed of each cell. A case of a law on
    numbers that has measured nothing, such as one whose run raised an exception, has judged nothing.
    Raises UsageError for an unknown profile.
    """
    planned = {(cell.but(seed=cell.seed + seed) if seed else cell).id: cell for cell in matrix.cells.values()}
    on_numbers = {law for law, scope in matrix.scopes.items() if scope.numbers}
    judged = {
        (case.law, planned[case.cell].id)
        for case in cases
        if case.cell in planned and has_judged(case, needs_measurement=case.law in on_numbers)
    }
    cells = dict.fromkeys([*matrix.profile_cells(profile), *(matrix.cells[cell] for _, cell in sorted(judged))])
    return coverage(matrix, list(cells), judged=judged)


def has_judged(case: CaseResult, *, needs_measurement: bool) -> bool:
    """Return whether a case has judged a run that ended, and where it needs to, by a measurement."""
    return case.verdict in _HAVE_JUDGED and (bool(case.measured) or not needs_measurement)


def judges_torch(case: CaseResult) -> bool:
    """Return whether a case has judged numbers, memory, traffic or state of torch, as the chapter of its law says."""
    chapter = Path(case.nodeid.partition("::")[0]).parent.name
    return chapter in _CHAPTERS and has_judged(case, needs_measurement=True)


def coverage_line(covered: Coverage) -> str:
    """Return one line: `coverage by laws on numbers: pairs 100 % of 3446, triples 78.7 % of 85934`."""
    pairs, triples = covered.pairs.values, covered.triples.values
    return f"coverage by laws on numbers: pairs {_of(pairs)}, triples {_of(triples)}"


def total_rows(covered: Coverage) -> list[list[str]]:
    """Return a row for pairs and triples, of any values and of values none of which is a default."""
    return [
        [f"{name} of {what}", *_cells(tally)]
        for name, combinations in (("pairs", covered.pairs), ("triples", covered.triples))
        for what, tally in (("any values", combinations.values), ("non-default values", combinations.features))
    ]


def axis_rows(covered: Coverage) -> list[list[str]]:
    """Return a row for each axis, with its pairs and triples: the least covered axis comes first."""
    pairs, triples = covered.pairs.axes, covered.triples.axes
    worst_first = sorted(pairs, key=lambda axis: (pairs[axis].share, triples[axis].share))
    return [[axis, *_cells(pairs[axis]), *_cells(triples[axis])] for axis in worst_first]


def law_rows(covered: Coverage) -> list[list[str]]:
    """Return a row for each law, and more where the law leaves out cells for several reasons."""
    return [row for law, entry in covered.laws.items() for row in _law_rows(law, entry)]


def _law_rows(law: str, entry: LawCoverage) -> Iterator[list[str]]:
    pairs = "" if entry.pairs is None else str(entry.pairs)
    share = share_text(Tally(entry.judged, entry.cells))
    first = [law, pairs, str(entry.cells), str(entry.judged), share]
    reasons = [[str(gap.cells), gap.where, gap.reason] for gap in entry.left_out]
    if entry.pending:
        reasons.append([str(entry.pending), "", _PENDING])
    for index, reason in enumerate(reasons or [["", "", ""]]):
        yield [*(first if index == 0 else [""] * len(first)), *reason]


def _cells(tally: Tally) -> list[str]:
    return [share_text(tally), str(tally.seen), str(tally.possible)]


def _of(tally: Tally) -> str:
    return f"{share_text(tally)} of {tally.possible}" if tally.possible else "none possible"
