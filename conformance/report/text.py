"""End of a session in words: for a terminal, as markdown for the summary of a CI job, as annotations for GitHub."""

import os
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.judge.verdicts import CONFORMANT, INCOMPLETE, NOT_CONFORMANT, SUITE_FAILED, USAGE, Verdict
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.plan.matrix import FAST_CELLS, TRAINER_CELLS, TRAINERS
from conformance.plan.scopes import in_order
from conformance.report.coverage import coverage_line
from conformance.report.explain import MAX_EXPLANATIONS, Explanation, explain, summary, title
from conformance.report.schema import CaseResult, Report
from conformance.report.torch_coverage import total_line
from conformance.report.trainer import judged_line, trainer_lines
from conformance.report.wording import counted

_OUTCOMES = {
    CONFORMANT: "CONFORMANT",
    NOT_CONFORMANT: "NOT CONFORMANT",
    SUITE_FAILED: "THE SUITE FAILED",
    USAGE: "USAGE ERROR",
    INCOMPLETE: "INCOMPLETE",
}
_NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
_MIN_WAIT_S = 1.0
"""Shortest time of waiting that is mentioned."""
_MAX_ANNOTATIONS = 10  # GitHub shows no more errors of one step


class Headline(msgspec.Struct, frozen=True):
    """Outcome of a session and its scope, which every rendering of a report shows first."""

    outcome: str
    """Meaning of the exit status: `CONFORMANT`, `NOT CONFORMANT`, `THE SUITE FAILED`, `USAGE ERROR`, `INCOMPLETE`."""
    incomplete: str
    """Clause about a session that ended early: `12 of 965 cases run, 1 error of the suite`; empty if all ended."""
    subject: str
    """Software and hardware that were judged: `torch 2.13.0+cpu, CPU (gloo, simulated), profile smoke`."""
    restrictions: list[str]
    """Reasons why the outcome is not that of the profile: `only --cells 'tp = 2'`, `defect grads-summed injected`."""
    judged: str
    """Clause about another trainer: its judged ingredients, and those of the suite; empty for the reference trainer."""
    warning: str
    """Clauses about a version of torch, and about devices, that were never tried; empty if there are none."""
    nothing_about: str
    """Clause about the limits of the session: `nothing about NCCL, CUDA streams: 13 cases unsupported`, or empty."""

    @property
    def verdict(self) -> str:
        """Outcome, and the cases of an incomplete session on which it rests."""
        is_said = self.outcome == _OUTCOMES[INCOMPLETE]
        run = self.incomplete if is_said or not self.incomplete else f"incomplete: {self.incomplete}"
        return f"{self.outcome} ({run})" if run else self.outcome

    @property
    def line(self) -> str:
        """Verdict, restrictions and subject in one line."""
        restricted = f" ({'; '.join(self.restrictions)})" if self.restrictions else ""
        return f"{self.verdict}{restricted}: {'; '.join(filter(None, [self.judged, self.subject]))}"


def headline(report: Report) -> Headline:
    """Return the headline of a report."""
    return Headline(
        outcome=_OUTCOMES.get(report.exit_code, f"ENDED WITH EXIT STATUS {report.exit_code}"),
        incomplete=_incomplete(report),
        subject=f"torch {report.environment['packages']['torch']}, {device_text(report)}, profile {report.profile}",
        restrictions=list(restrictions(report)),
        judged=judged_line(report.trainer) if report.trainer else "",
        warning="; ".join(filter(None, [report.environment.get("untried_torch", ""), _unverified(report)])),
        nothing_about=_nothing_about(report),
    )


def _incomplete(report: Report) -> str:
    if not any(case.verdict == Verdict.NOT_RUN for case in report.cases):
        return ""
    errors = sum(case.verdict == Verdict.ERROR for case in report.cases)
    wrong = f", {counted(errors, 'error')} of the suite" if errors else ""
    return f"{report.executed} of {counted(report.planned, 'case')} run{wrong}"


def _unverified(report: Report) -> str:
    """Return a clause about laws of any trainer on CUDA devices, or nothing: none has run on a GPU so far."""
    on_cuda = report.trainer is not None and report.environment.get("device", {}).get("type") == "cuda"
    return "unverified on a GPU: laws of any trainer have run on none so far, see docs/gpu.md" if on_cuda else ""


def restrictions(report: Report) -> Iterator[str]:
    """Yield the reasons why a report does not tell the outcome of its profile on an unchanged product."""
    if report.selection:
        yield f"only {report.selection}"
    if report.profile == TRAINERS and "--fast" in shlex.split(report.selection):
        yield f"{len(FAST_CELLS)} of {len(TRAINER_CELLS)} cells, nothing about offloading, no fault tried"
    if report.defect:
        yield f"defect {report.defect} injected"
    arithmetic = msgspec.convert(report.environment.get("hardware", {}).get("arithmetic", {}), Arithmetic)
    if arithmetic != OWN:
        yield f"kernels {arithmetic.kernels}, sums {arithmetic.sums}"


def terminal_lines(report: Report, place: str) -> Iterator[str]:
    """Yield the headline, failures by cause, the table of laws, reasons of cases not judged, scope, and the outcome.

    `place` is a clause that says where the report is.
    """
    head = headline(report)
    yield head.line
    if head.warning:
        yield f"warning: {head.warning}"
    if head.nothing_about:
        yield head.nothing_about
    if not report.planned:
        yield "no case is selected: see python -m conformance list for what the profile has, and --cells"
    yield from _failures(explain(report))
    table = (_cell_table if report.trainer else _law_table)(report, table_format="simple")
    yield f"\n{table}\n" if table else ""
    yield from (*_not_judged(report), *_scope(report))
    yield from _exposed_communication(report)
    wait_s = sum(case.wait_s for case in report.cases)
    if wait_s >= _MIN_WAIT_S:
        yield f"cases waited {wait_s:.0f} s in total for devices, processors or another worker's run"
    yield f"\n{head.verdict}: {'; '.join(filter(None, [head.judged, _ending(report), place]))}"


def markdown(report: Report) -> str:
    """Return the end of a session as markdown for the readers of a pull request: failures come first."""
    head = headline(report)
    blocks = [f"## {head.line}", _plain(head.warning), _plain(head.nothing_about), _ending(report)]
    blocks += [*_failures_in_markdown(explain(report))]
    blocks.append((_cell_table if report.trainer else _law_table)(report, table_format="github"))
    if report.trainer:
        blocks.append(f"### Trainer {_plain(report.trainer.name)}")
    blocks.append("\n".join(f"- {_plain(line)}" for line in [*_not_judged(report), *_scope(report)]))
    return "\n\n".join(filter(None, blocks)) + "\n"


def short_markdown(report: Report) -> str:
    """Return the outcome as markdown for the summary of a job: a table of causes, or one line if all laws hold."""
    head = headline(report)
    explanations = explain(report)
    rows = [
        [
            f"`{each.first.law}`",
            f"{counted(each.case_count, 'case')}, `{each.first.cell}`",
            _plain(each.short_reason).replace("|", r"\|"),
            ":".join(_owners_line(each, report).values()),
        ]
        for each in explanations[:MAX_EXPLANATIONS]
    ]
    table = tabulate(rows, headers=["law", "cells", "reason", "line"], tablefmt="github") if rows else ""
    seen = report.trainer.seen if report.trainer else ""
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in report.verdicts.items())
    blocks = [
        f"## {_plain(head.line)}",
        _plain(head.warning),
        table,
        _more(explanations),
        _plain(f"{verdicts}. {seen}"),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def annotations(report: Report, *, is_asked: bool = False) -> list[str]:
    """Return a line for each cause of failures, those of most cases first, at the line of the product if it is known.

    None outside of GitHub Actions, unless they are asked for.
    GitHub Actions shows lines that begin with `::error` on a run and its commit, see
    https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions.
    """
    if not is_asked and os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return [_annotation(explanation, report) for explanation in explain(report)[:_MAX_ANNOTATIONS]]


def device_text(report: Report) -> str:
    """Return the devices of a session, with the substrates of judged cases: `CPU (gloo, simulated)`."""
    device = report.environment["device"]
    names = {"cpu": "CPU", "sim": device.get("name")}
    name = names.get(device.get("type")) or f"{device['count']} x {device['name']}"
    judged = sorted({case.substrate for case in report.cases if case.verdict not in _NOT_JUDGED} - {""})
    return f"{name} ({', '.join(judged)})" if judged else name


def _nothing_about(report: Report) -> str:
    number = sum(case.verdict == Verdict.UNSUPPORTED for case in report.cases)
    unsupported = f"{counted(number, 'case')} unsupported" if number else ""
    blind_to = report.environment.get("cannot_show", "")
    return ": ".join(filter(None, [f"nothing about {blind_to}" if blind_to else "", unsupported]))


def _ending(report: Report) -> str:
    """Return one line: how many cases were executed, in which time, with which exit status."""
    expected = "" if report.expected_s is None else f" ({report.expected_s:.0f} s expected)"
    return (
        f"{report.executed} of {counted(report.planned, 'case')} executed in {report.duration_s:.1f} s{expected}, "
        f"exit status {report.exit_code}"
    )


def _failures(explanations: Sequence[Explanation]) -> Iterator[str]:
    if explanations:
        yield f"\n{title(explanations)}: {summary(explanations)}"
    for number, each in enumerate(explanations[:MAX_EXPLANATIONS], start=1):
        if each.cause:
            yield f"\n{number}. {each.short_reason}"
            yield from (f"     | {line}" for line in each.cause.short_traceback)
        else:
            yield f"\n{each.first.verdict}: {each.first.id}: {each.short_reason}\n  {each.first.must}"
        yield from (f"  {line}" for line in each.details)
        yield from (f"  {purpose}: {command}" for purpose, command in each.commands)
    if more := _more(explanations):
        yield f"\n{more}"


def _failures_in_markdown(explanations: Sequence[Explanation]) -> Iterator[str]:
    """Yield the blocks of a section; a list item for each cause, with a block of code for its command."""
    if explanations:
        yield f"### {title(explanations)}\n\n{_plain(summary(explanations))}"
    for each in explanations[:MAX_EXPLANATIONS]:
        first = each.first
        item = [f"- **{first.verdict}** `{first.id}`: {_plain(each.short_reason)}. {_plain(first.must)}"]
        item += [f"  - {_plain(line)}" for line in each.details]
        lines = "\n  ".join(command for _purpose, command in each.commands)
        yield "\n".join([*item, "", f"  ```\n  {lines}\n  ```"])
    yield _more(explanations)


def _more(explanations: Sequence[Explanation]) -> str:
    """Return a line about the laws and causes that are not shown; empty if all are."""
    more = sum(len(each.with_related) for each in explanations[MAX_EXPLANATIONS:])
    return f"and {counted(more, 'more group')} of failures: see report.html" if more else ""


def _annotation(explanation: Explanation, report: Report) -> str:
    """Return a command of GitHub's workflows; the title of another trainer is the name of the case in JUnit files."""
    kind = "warning" if explanation.is_drift else "error"
    first = explanation.first
    properties = {**_owners_line(explanation, report), "title": f"{first.verdict}: {first.id}"}
    if report.trainer:
        properties["title"] = f"{first.law}[{first.cell}] of {report.trainer.name}"
    given = [f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}" for name, value in properties.items()]
    message = _escape("\n".join([explanation.short_reason, *explanation.details]))
    return f"::{kind} {','.join(given)}::{message}"


def _owners_line(explanation: Explanation, report: Report) -> dict[str, str]:
    """Return `file` and `line` of the first wrong place in the working directory: GitHub knows no files elsewhere.

    Without such a place they are the file of another trainer alone, or nothing.
    """
    location = explanation.location
    for code in (location.called, location.issued) if location else ():
        if code and (file := _below_here(code.file)):
            return {"file": file, "line": str(code.line)}
    file = _below_here(report.trainer.given.partition(":")[0]) if report.trainer else ""
    return {"file": file} if file else {}


def _below_here(file: str) -> str:
    """Return the path of a file in the working directory, relative to it; empty for any other."""
    path, here = Path(file).absolute(), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) and path.is_file() else ""


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _law_table(report: Report, *, table_format: str) -> str:
    """Return a table of laws by verdict, with the time in seconds that the cases of each law took.

    Cases that the session has not reached are counted by a line of `_not_judged` alone.
    """
    columns = [verdict.value for verdict in Verdict if verdict.value in report.verdicts and verdict != Verdict.NOT_RUN]
    by_law: dict[str, list[CaseResult]] = defaultdict(list)
    for case in report.cases:
        if case.verdict != Verdict.NOT_RUN:
            by_law[case.law].append(case)
    rows = []
    for law in sorted(by_law, key=in_order):
        counts = Counter(case.verdict for case in by_law[law])
        seconds = sum(case.duration_s for case in by_law[law])
        rows.append([law, *(counts[column] or "" for column in columns), f"{seconds:.1f}"])
    return tabulate(rows, headers=["law", *columns, "seconds"], tablefmt=table_format) if rows else ""


def _cell_table(report: Report, *, table_format: str) -> str:
    """Return a table of the cells on which another trainer was judged: cases by verdict, and the outcome."""
    columns = [verdict.value for verdict in Verdict if verdict.value in report.verdicts and verdict not in _NOT_JUDGED]
    numbers = {cell: number for number, cause in enumerate(report.causes, start=1) for cell in cause.cells}
    by_cell: dict[str, list[CaseResult]] = defaultdict(list)
    for case in report.cases:
        by_cell[case.cell].append(case)
    rows = []
    for cell, cases in by_cell.items():
        counts = Counter(case.verdict for case in cases)
        if not any(counts[column] for column in columns):
            continue
        did_run = any(counts[verdict] for verdict in (Verdict.PASS, Verdict.FAIL))
        outcome = f"cause {numbers[cell]}" if cell in numbers else ""
        rows.append(
            [cell, *(counts[column] or "" for column in columns), outcome if did_run else f"did not run: {outcome}"]
        )
    return tabulate(rows, headers=["cell", *columns, "outcome"], tablefmt=table_format) if rows else ""


def _not_judged(report: Report) -> Iterator[str]:
    """Yield a line for each reason of cases that are waived, unsupported or not run."""
    waived = Counter(case.reason.partition(": ")[0] for case in report.cases if case.verdict == Verdict.WAIVED)
    yield from (f"waived, {counted(number, 'case')}: {issue}" for issue, number in waived.items())
    others = Counter(case.reason for case in report.cases if case.verdict == Verdict.UNSUPPORTED)
    yield from (f"{Verdict.UNSUPPORTED}, {counted(number, 'case')}: {reason}" for reason, number in others.items())
    yield from not_run(report)


def not_run(report: Report) -> Iterator[str]:
    """Yield a line for each reason for which a session has not reached cases, with the number of cases and laws."""
    laws: dict[str, list[str]] = defaultdict(list)
    for case in report.cases:
        if case.verdict == Verdict.NOT_RUN:
            laws[case.reason].append(case.law)
    for reason, of in laws.items():
        yield f"{Verdict.NOT_RUN}, {counted(len(of), 'case')} of {counted(len(set(of)), 'law')}: {reason}"


def _scope(report: Report) -> list[str]:
    """Return the lines about another trainer, whose cells are fixed, or else the coverage of the profile."""
    if report.trainer:
        return list(trainer_lines(report.trainer))
    torch_lines = [total_line(report.torch_coverage)] if report.torch_coverage else []
    return [coverage_line(report.coverage), *torch_lines]


def _exposed_communication(report: Report) -> Iterator[str]:
    """Yield a line about time in which ranks communicate and compute nothing; a fact, no verdict."""
    shares = {cell: facts.communication.exposed_share for cell, facts in report.cells.items() if facts.communication}
    if shares:
        most, median = max(shares, key=shares.__getitem__), statistics.median(shares.values())
        yield (
            f"a step communicates while nothing is computed for {median:.0%} of its time in the median of "
            f"{counted(len(shares), 'cell')}, for {shares[most]:.0%} in {most}"
        )


def _plain(text: str) -> str:
    """Return one line without marks of markdown or HTML."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
