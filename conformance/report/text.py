"""End of a session in words: for a terminal, and as markdown for the summary of a CI job."""

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from conformance.judge.law import in_order
from conformance.judge.verdicts import Verdict
from conformance.report.schema import CaseResult, Report
from conformance.report.wording import counted, derivation_text, is_outside, terms_text, value_text

_TOLD_WAIT_S = 1.0


def terminal_lines(report: Report, directory: Path) -> Iterator[str]:
    """Yield the table of laws, then all that is neither pass nor unsupported, with the command that repeats it."""
    if not report.planned:
        yield "no case is selected: see python -m conformance list for what the profile has, and --cells"
    yield law_table(report, table_format="simple")
    for case, others in _notable(report):
        yield f"\n{case.verdict}: {case.id}: {case.reason}\n  {case.must}"
        yield from (f"  {line}" for line in _broken_bounds(case))
        yield f"  repeat: {case.repro}"
        if others:
            yield f"  and {counted(others, 'case')} with the same reason"
    for reason, number in _unsupported(report).items():
        yield f"unsupported, {counted(number, 'case')}: {reason}"
    yield from _exposed_communication(report)
    yield from _waiting(report)
    yield f"\n{ending(report)}; report: {directory}"


def markdown(report: Report) -> str:
    """Return the end of a session as markdown for the readers of a pull request: faults come first."""
    blocks = [f"## Conformance: {ending(report)}", f"torch {report.environment['packages']['torch']}"]
    for case, others in _notable(report):
        also = f" And {counted(others, 'case')} with the same reason." if others else ""
        blocks.append(f"- **{case.verdict}** `{case.id}`: {_plain(case.reason)}.{also} {_plain(case.must)}")
        blocks += [f"  {_plain(line)}" for line in _broken_bounds(case)]
        blocks.append(f"  ```\n  {case.repro}\n  ```")
    for reason, number in _unsupported(report).items():
        blocks.append(f"- unsupported, {counted(number, 'case')}: {_plain(reason)}")
    return "\n\n".join([*blocks, law_table(report, table_format="github")]) + "\n"


def ending(report: Report) -> str:
    """Return one line: how many cases were executed, in which time, with which exit status."""
    return (
        f"profile {report.profile}: {report.executed} of {counted(report.planned, 'case')} executed in "
        f"{report.duration_s:.1f} s, exit status {report.exit_code}"
    )


def law_table(report: Report, *, table_format: str) -> str:
    """Return a table of laws by verdict, with the time in seconds that the cases of each law took."""
    columns = [verdict.value for verdict in Verdict if verdict.value in report.verdicts]
    rows = []
    for law in sorted({case.law for case in report.cases}, key=in_order):
        of_law = [case for case in report.cases if case.law == law]
        counts = Counter(case.verdict for case in of_law)
        rows.append([law, *(counts[column] or "" for column in columns), f"{sum(c.duration_s for c in of_law):.1f}"])
    return tabulate(rows, headers=["law", *columns, "seconds"], tablefmt=table_format)


def _notable(report: Report) -> Iterator[tuple[CaseResult, int]]:
    """Cases to tell of, and how many more have the same reason: only errors of the suite are counted together."""
    errors = Counter(case.reason for case in report.cases if case.verdict == Verdict.ERROR)
    for case in report.cases:
        number = errors.pop(case.reason, 0) if case.verdict == Verdict.ERROR else 1
        if case.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED) and number:
            yield case, number - 1


def _broken_bounds(case: CaseResult) -> Iterator[str]:
    """One line for each metric outside of a bound that has a derivation: what the reason does not say already."""
    for name, metric in case.measured.items():
        if not metric.terms or not is_outside(metric):
            continue
        if metric.formula in case.reason:
            yield f"terms of the bound: {terms_text(metric)}"
        else:
            yield f"{name}{f' at {metric.at}' if metric.at else ''}: {value_text(metric)}, {derivation_text(metric)}"


def _unsupported(report: Report) -> Counter[str]:
    return Counter(case.reason for case in report.cases if case.verdict == Verdict.UNSUPPORTED)


def _exposed_communication(report: Report) -> Iterator[str]:
    """One line; a fact, no verdict."""
    shares = {cell: facts.communication.exposed_share for cell, facts in report.cells.items() if facts.communication}
    if shares:
        most, median = max(shares, key=shares.__getitem__), statistics.median(shares.values())
        yield (
            f"a step communicates while nothing is computed for {median:.0%} of its time in the median of "
            f"{counted(len(shares), 'cell')}, for {shares[most]:.0%} in {most}"
        )


def _waiting(report: Report) -> Iterator[str]:
    wait_s = sum(case.wait_s for case in report.cases)
    if wait_s >= _TOLD_WAIT_S:
        yield f"cases waited {wait_s:.0f} s in total for devices, processors or another worker's run"


def _plain(text: str) -> str:
    """One line without marks of markdown or HTML."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
