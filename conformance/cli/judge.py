"""`python -m conformance judge SUBJECT`: a session of the suite in which another trainer is judged."""

import argparse
import contextlib
import datetime
import os
import sys
from pathlib import Path

import pytest

from conformance.cli.command import Answer, Commands, add_limit
from conformance.cli.loop_file import write_for
from conformance.cli.waive import LASTS_DAYS, accepted_entries
from conformance.judge.accepted import accept, require_day
from conformance.project import require_checkout
from conformance.pytest_plugin.options import EXPLAIN_S, FAST_EXPLAIN_S
from conformance.report.schema import Report, read_report
from conformance.report.text import short_markdown
from conformance.report.wording import counted
from conformance.run import known_trainers
from conformance.run.kinds import DEFAULT_KIND, LOOP_KIND, kinds, write_example
from reference_trainer.checks import UsageError

_EXAMPLE, _LOOP_EXAMPLE = Path("my_subject.py"), Path("my_loop.py")
_ACCEPTED = Path("conformance-accepted.yaml")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "judge", help="is my own parallelisation right? exit status 1 if not, 4 if it cannot be judged"
    )
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="SUBJECT",
        help="MODULE:NAME or FILE.py:NAME, decorated with subject(...), or a name of --list",
    )
    parser.add_argument("--list", action="store_true", help="list the subjects that installed packages register")
    parser.add_argument(
        "--init",
        nargs="?",
        type=Path,
        const=_EXAMPLE,
        metavar="FILE",
        help=f"write an example to begin with (default: {_EXAMPLE})",
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        help=f"with --init: one of {', '.join(kinds())} (default: {DEFAULT_KIND}); docs/kinds.md has a section on each",
    )
    parser.add_argument(
        "--loop",
        nargs="?",
        const="",
        metavar="FILE.py:NAME",
        help=f"with --init: an example of an own loop ({_LOOP_EXAMPLE}), or what is left to say about a function or a "
        "class that trains",
    )
    parser.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'mesh = dp2', or an id")
    parser.add_argument(
        "--accelerator",
        metavar="WHAT",
        help="cpu, sim[:SCHEDULE] (a simulated accelerator, with laws about streams), or cuda (unverified on a GPU) "
        "(default: cpu)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="only the cells that show most, and no faults: for each commit"
    )
    parser.add_argument(
        "--accepted", type=Path, metavar="FILE", help="failures that are accepted until a day, for a reason (YAML)"
    )
    parser.add_argument("--accept", metavar="REASON", help=f"add what fails to that file (default: {_ACCEPTED})")
    parser.add_argument(
        "--until", type=require_day, metavar="DATE", help=f"last day of --accept (default: in {LASTS_DAYS} days)"
    )
    parser.add_argument("--annotations", action="store_true", help="print GitHub's annotations elsewhere, too")
    parser.add_argument("--no-faults", action="store_true", help="do not test whether the laws see faults")
    parser.add_argument(
        "--explain",
        type=float,
        metavar="SECONDS",
        help=f"time to search where failures begin; 0: none (default: {EXPLAIN_S}, with --fast {FAST_EXPLAIN_S})",
    )
    parser.add_argument("--keep", action="store_true", help="keep the verdicts in docs/subjects, in a checkout")
    parser.add_argument("--json", action="store_true", help="print report.json instead of the summary")
    parser.add_argument(
        "--report-dir", type=Path, default=Path("conformance-report"), metavar="DIR", help="where the report goes"
    )
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="an earlier report, to compare with")
    add_limit(parser, of="the runs of one case", default=60.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Judge a subject, list those that are known, or write an example; the session itself prints its summary.

    Raises UsageError, with one line, for options that cannot be used.
    """
    if options.subject is not None and (options.list or options.init is not None):
        raise UsageError(f"--{'list' if options.list else 'init'} judges nothing: leave out the subject")
    if options.list:
        return Answer(known_trainers.as_text(known_trainers.known_subjects()))
    if options.init is not None:
        return _write(options.init, kind=options.kind, loop=options.loop)
    for name in ("kind", "loop"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} chooses the file that --init writes: give --init, too")
    if options.subject is None:
        raise UsageError("no subject: write MODULE:NAME, FILE.py:NAME or a name of --list, or begin with --init")
    if options.until is not None and options.accept is None:
        raise UsageError("--until is the last day of --accept REASON: give both")
    if options.accept is not None and options.accepted is None and _ACCEPTED.exists():
        options.accepted = _ACCEPTED
    known_trainers.resolve(options.subject)
    if options.keep:
        require_checkout("--keep")
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with quiet:
        status = int(pytest.main(_session_arguments(options)))
    file = options.report_dir / "report.json"
    if status not in _WITH_REPORT:
        return Answer("", status)
    report = read_report(options.report_dir)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a") as stream:
            stream.write(short_markdown(report))
    if options.accept is not None:
        _accept(report, options)
    if options.keep:
        _keep(report)
    return Answer(file.read_text() if options.json else "", status)


def _keep(report: Report) -> None:
    """Keep the verdicts in docs/subjects, except for a session that was interrupted: its report lacks most of them."""
    if report.trainer is None:
        print("not kept: the session was interrupted", file=sys.stderr)
        return
    from conformance.subjects.keeping import keep  # loads torch, which only judging needs

    keep(report)


def _accept(report: Report, options: argparse.Namespace) -> None:
    """Add an entry for each law that fails to the file of accepted failures, and say so."""
    file = options.accepted or _ACCEPTED
    until = options.until or (datetime.date.today() + datetime.timedelta(days=LASTS_DAYS)).isoformat()
    entries = accepted_entries(report, reason=options.accept, until=until)
    if entries:
        accept(file, entries)
    print(f"{file}: {counted(len(entries), 'more law')} accepted until {until}", file=sys.stderr)


_WITH_REPORT = (0, 1, 3)
"""Exit statuses of sessions that leave a new report."""


def _session_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of pytest: neither options nor conftest files of the user's own project have a say."""
    given = {
        "subject": options.subject,
        "deadline": options.limit,
        "report-dir": options.report_dir,
        "cells": options.cells,
        "accelerator": options.accelerator,
        "baseline": options.baseline,
        "explain": options.explain,
        "accepted": options.accepted,
    }
    chosen = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags = [f"--{name}" for name in ("no-faults", "fast", "annotations") if vars(options)[name.replace("-", "_")]]
    flags += ["-qq" if options.json else "-q", "-rN", "--disable-warnings"]
    return ["--pyargs", "conformance.laws.trainers", "--override-ini=addopts=", "--noconftest", *chosen, *flags]


def _write(file: Path, *, kind: str | None, loop: str | None) -> Answer:
    """Write an example, or the declaration of a trainer's own loop."""
    if kind and loop is not None:
        raise UsageError(f"--loop writes the kind {LOOP_KIND}: leave out --kind")
    if loop:
        written, subject = write_for(loop)
        return Answer(f"written: {written}: fill in what it marks\nnext: conformance judge {subject}")
    if loop is not None:
        kind, file = LOOP_KIND, _LOOP_EXAMPLE if file == _EXAMPLE else file
    commands = write_example(kind or DEFAULT_KIND, file)
    return Answer("\n".join([f"written: {file}", *(f"next: {command}" for command in commands)]))
