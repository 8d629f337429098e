"""`python -m conformance judge SUBJECT`: a session of the suite in which another trainer is judged."""

import argparse
import contextlib
import sys
from pathlib import Path

import msgspec
import pytest

from conformance.cli.command import Answer, Commands, add_limit
from conformance.project import require_checkout
from conformance.report.schema import Report
from conformance.run import known_trainers
from conformance.run.kinds import DEFAULT_KIND, kinds, write_example
from reference_trainer.checks import UsageError

_EXAMPLE = Path("my_subject.py")


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
        "--kind", metavar="KIND", help=f"with --init: one of {', '.join(kinds())} (default: {DEFAULT_KIND})"
    )
    parser.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'mesh = dp2', or an id")
    parser.add_argument(
        "--accelerator",
        metavar="WHAT",
        help="cpu, or sim[:SCHEDULE]: on the simulated accelerator, with laws about streams and memory (default: cpu)",
    )
    parser.add_argument("--no-faults", action="store_true", help="do not test whether the laws see faults")
    parser.add_argument(
        "--explain",
        type=float,
        metavar="SECONDS",
        help="time to search where failures begin; 0: none (default: 30)",
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
        return _write_example(options.init, options.kind or DEFAULT_KIND)
    if options.kind is not None:
        raise UsageError("--kind chooses the example that --init writes: give --init, too")
    if options.subject is None:
        raise UsageError("no subject: write MODULE:NAME, FILE.py:NAME or a name of --list, or begin with --init")
    known_trainers.resolve(options.subject)
    if options.keep:
        require_checkout("--keep")
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with quiet:
        status = int(pytest.main(_session_arguments(options)))
    file = options.report_dir / "report.json"
    if status not in _WITH_REPORT:
        return Answer("", status)
    if options.keep:
        from conformance.subjects.keeping import keep  # loads torch, which only judging needs

        keep(msgspec.json.decode(file.read_bytes(), type=Report))
    return Answer(file.read_text() if options.json else "", status)


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
    }
    chosen = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags = ["--no-faults"] * options.no_faults + ["-qq"] * options.json
    return ["--pyargs", "conformance.laws.trainers", "--override-ini=addopts=", "--noconftest", *chosen, *flags]


def _write_example(file: Path, kind: str) -> Answer:
    commands = write_example(kind, file)
    return Answer("\n".join([f"written: {file}", *(f"next: {command}" for command in commands)]))
