"""End of a session in words: for a terminal, and as markdown for the summary of a CI job."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from conformance.judge.verdicts import Verdict
from conformance.plan.scopes import in_order
from conformance.report.coverage import coverage_line
from conformance.report.failure_groups import FailureGroup, failure_groups
from conformance.report.failure_text import MAX_CAUSES, causes, commands, details, reason_text, summary, title
from conformance.report.headline import headline, headline_line
from conformance.report.schema import Report
from conformance.report.wording import counted

_TOLD_WAIT_S = 1.0
_WITHOUT_JUDGEMENT = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


def terminal_lines(report: Report, place: str) -> Iterator[str]:
    """Yield the headline, what failed by cause, the table of laws, what was not judged, the coverage, and the outcome.

    `place` is a clause that says where the report is.
    """
    yield headline_line(report)
    if blind_to := headline(report).nothing_about:
        yield blind_to
    if not report.planned:
        yield "no case is selected: see python -m conformance list for what the profile has, and --cells"
    yield from _failures(failure_groups(report))
    yield f"\n{law_table(report, table_format='simple')}\n"
    yield from _briefly(report)
    yield coverage_line(report.coverage)
    yield from _exposed_communication(report)
    yield from _waiting(report)
    yield f"\n{headline(report).outcome}: {ending(report)}; {place}"


def markdown(report: Report) -> str:
    """Return the end of a session as markdown for the readers of a pull request: what failed comes first."""
    blocks = [f"## {headline_line(report)}", _plain(headline(report).nothing_about), ending(report)]
    blocks += [*_failures_in_markdown(failure_groups(report)), law_table(report, table_format="github")]
    blocks.append("\n".join(f"- {_plain(line)}" for line in [*_briefly(report), coverage_line(report.coverage)]))
    return "\n\n".join(filter(None, blocks)) + "\n"


def ending(report: Report) -> str:
    """Return one line: how many cases were executed, in which time, with which exit status."""
    return (
        f"{report.executed} of {counted(report.planned, 'case')} executed in {report.duration_s:.1f} s, "
        f"exit status {report.exit_code}"
    )


def _failures(groups: Sequence[FailureGroup]) -> Iterator[str]:
    if groups:
        yield f"\n{title(groups)}: {summary(groups)}"
    for cause in causes(groups)[:MAX_CAUSES]:
        first = cause[0]
        yield f"\n{first.verdict}: {first.cases[0].id}: {reason_text(first)}\n  {first.must}"
        yield from (f"  {line}" for line in details(cause))
        yield from (f"  {purpose}: {command}" for purpose, command in commands(first))
    if more := _more(groups):
        yield f"\n{more}"


def _failures_in_markdown(groups: Sequence[FailureGroup]) -> Iterator[str]:
    """Blocks of a section; a list item for each cause, with a block of code for its command."""
    if groups:
        yield f"### {title(groups)}\n\n{_plain(summary(groups))}"
    for cause in causes(groups)[:MAX_CAUSES]:
        first = cause[0]
        item = [f"- **{first.verdict}** `{first.cases[0].id}`: {_plain(reason_text(first))}. {_plain(first.must)}"]
        item += [f"  - {_plain(line)}" for line in details(cause)]
        lines = "\n  ".join(command for _purpose, command in commands(first))
        yield "\n".join([*item, "", f"  ```\n  {lines}\n  ```"])
    yield _more(groups)


def _more(groups: Sequence[FailureGroup]) -> str:
    """Line about groups that are not told; empty if all are."""
    more = sum(len(cause) for cause in causes(groups)[MAX_CAUSES:])
    return f"and {counted(more, 'more group')} of failures: see report.html" if more else ""


def law_table(report: Report, *, table_format: str) -> str:
    """Return a table of laws by verdict, with the time in seconds that the cases of each law took."""
    columns = [verdict.value for verdict in Verdict if verdict.value in report.verdicts]
    rows = []
    for law in sorted({case.law for case in report.cases}, key=in_order):
        of_law = [case for case in report.cases if case.law == law]
        counts = Counter(case.verdict for case in of_law)
        rows.append([law, *(counts[column] or "" for column in columns), f"{sum(c.duration_s for c in of_law):.1f}"])
    return tabulate(rows, headers=["law", *columns, "seconds"], tablefmt=table_format)


def _briefly(report: Report) -> Iterator[str]:
    """One line for each reason of cases that are waived, unsupported or not run."""
    waived = Counter(case.reason.partition(": ")[0] for case in report.cases if case.verdict == Verdict.WAIVED)
    yield from (f"waived, {counted(number, 'case')}: {issue}" for issue, number in waived.items())
    others = Counter((c.verdict, c.reason) for c in report.cases if c.verdict in _WITHOUT_JUDGEMENT)
    yield from (f"{verdict}, {counted(number, 'case')}: {reason}" for (verdict, reason), number in others.items())


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
