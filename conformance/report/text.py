"""What a session ends with, in words: for a terminal, and as markdown for the page of a CI job."""

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from conformance.judge.law import in_order
from conformance.judge.verdicts import Verdict
from conformance.report.schema import CaseResult, Report


def terminal_lines(report: Report, directory: Path) -> Iterator[str]:
    """The table of laws; then everything that is neither pass nor unsupported, with the command that repeats it."""
    if not report.planned:
        yield "no case is selected: see python -m conformance list for what the profile has, and --cells"
    yield law_table(report, table_format="simple")
    for case, others in _told(report):
        yield f"\n{case.verdict}: {case.id}: {case.reason}\n  {case.must}\n  repeat: {case.repro}"
        if others:
            yield f"  and {others} cases with the same reason"
    for reason, number in _unsupported(report).items():
        yield f"unsupported, {number} cases: {reason}"
    yield from _exposed(report)
    yield f"\n{ending(report)}; report: {directory}"


def markdown(report: Report) -> str:
    """The same for people who look at a pull request: what is wrong comes first."""
    parts = [f"## Conformance: {ending(report)}", f"torch {report.environment['packages']['torch']}"]
    for case, others in _told(report):
        also = f" And {others} cases with the same reason." if others else ""
        parts.append(f"- **{case.verdict}** `{case.id}`: {_plain(case.reason)}.{also} {_plain(case.must)}")
        parts.append(f"  ```\n  {case.repro}\n  ```")
    parts += [f"- unsupported, {number} cases: {_plain(reason)}" for reason, number in _unsupported(report).items()]
    return "\n\n".join([*parts, law_table(report, table_format="github")]) + "\n"


def ending(report: Report) -> str:
    """One line."""
    return (
        f"profile {report.profile}: {report.executed} of {report.planned} cases executed in "
        f"{report.duration_s:.1f} s, exit status {report.exit_code}"
    )


def law_table(report: Report, *, table_format: str) -> str:
    """Laws by verdict, with the time that each law's cases took."""
    columns = [verdict.value for verdict in Verdict if verdict.value in report.verdicts]
    rows = []
    for law in sorted({case.law for case in report.cases}, key=in_order):
        of_law = [case for case in report.cases if case.law == law]
        counts = Counter(case.verdict for case in of_law)
        rows.append([law, *(counts[column] or "" for column in columns), f"{sum(c.duration_s for c in of_law):.1f}"])
    return tabulate(rows, headers=["law", *columns, "seconds"], tablefmt=table_format)


def _told(report: Report) -> Iterator[tuple[CaseResult, int]]:
    """Cases to tell of, and how many more have the same reason: only errors of the suite are counted together."""
    errors = Counter(case.reason for case in report.cases if case.verdict == Verdict.ERROR)
    for case in report.cases:
        number = errors.pop(case.reason, 0) if case.verdict == Verdict.ERROR else 1
        if case.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED) and number:
            yield case, number - 1


def _unsupported(report: Report) -> Counter[str]:
    return Counter(case.reason for case in report.cases if case.verdict == Verdict.UNSUPPORTED)


def _exposed(report: Report) -> Iterator[str]:
    """One line; a fact."""
    shares = {name: one.communication.exposed_share for name, one in report.cells.items() if one.communication}
    if shares:
        most, middle = max(shares, key=shares.__getitem__), statistics.median(shares.values())
        yield (
            f"a step communicates while nothing is computed for {middle:.0%} of its time in the median of "
            f"{len(shares)} cells, for {shares[most]:.0%} in {most}"
        )


def _plain(text: str) -> str:
    """One line without marks of markdown or HTML."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
