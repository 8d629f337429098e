"""`python -m conformance judge SUBJECT`: other people's trainers, judged."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from conformance.cli import known_subjects
from conformance.cli.command import Answer, Commands, add_limit
from conformance.project import PACKAGE, require_checkout
from conformance.run.pool import Pools
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

if TYPE_CHECKING:
    from conformance.subjects.cells import SubjectCell

TEMPLATE = PACKAGE / "subjects" / "example.py.txt"
"""Commented example that `--init` writes."""
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
    parser.add_argument("--cells", metavar="ID,...", help="run these cells alone, such as dp2-fp32")
    parser.add_argument("--no-faults", action="store_true", help="do not test whether the laws see faults")
    parser.add_argument("--keep", action="store_true", help="keep the verdicts in docs/subjects/, in a checkout")
    parser.add_argument("--json", action="store_true", help="print verdicts, metrics and bounds as JSON")
    add_limit(parser, of="a run", default=60.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Judge a subject, list those that are known, or write an example.

    Raises UsageError, with one line, for a subject that cannot be judged.
    """
    if options.subject is not None and (options.list or options.init is not None):
        raise UsageError(f"--{'list' if options.list else 'init'} judges nothing: leave out the subject")
    if options.list:
        return Answer(known_subjects.as_text(known_subjects.known_subjects()))
    if options.init is not None:
        return _write_example(options.init)
    if options.subject is None:
        raise UsageError("no subject: write MODULE:NAME, FILE.py:NAME or a name of --list, or begin with --init")
    subject = known_subjects.resolve(options.subject)
    if options.keep:
        require_checkout("--keep")
    # Torch is for those who judge: no other command pays for its import.
    from conformance.subjects.judging import judge_subject
    from conformance.subjects.running import SubjectRuns
    from conformance.subjects.text import as_text

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the command is a script: Python looks in the script's directory
    cells, named = _cells(options.cells)
    with tempfile.TemporaryDirectory() as directory, Pools() as pools:
        runs = SubjectRuns(subject, pools, Path(directory), options.limit)
        if other := named - {runs.description.name}:
            raise UsageError(f"--cells names cells of {min(other)}: the subject is {runs.description.name}")
        report = judge_subject(runs, cells=cells, with_faults=not options.no_faults)
    if options.keep:
        from conformance.subjects.keeping import keep

        keep(options.subject, report)
    if options.json:
        return Answer(msgspec.json.format(msgspec.json.encode(report), indent=1).decode(), report.status)
    return Answer(as_text(report), report.status)


def _write_example(file: Path) -> Answer:
    if file.suffix != ".py":
        raise UsageError(f"{file} is no Python file: give a name that ends in .py")
    if file.exists():
        raise UsageError(f"{file} exists: give another name, or remove it")
    file.write_text(TEMPLATE.read_text().replace("FILE:", f"{file.name}:"))
    return Answer(f"written: {file}\nnext: conformance judge {file}:parallelize")


def _cells(names: str | None) -> "tuple[list[SubjectCell], set[str]]":
    """Return the cells with these ids, or all, and the subjects that they name, as cells in reports do."""
    from conformance.subjects.cells import CELLS, split_name

    by_id = {cell.id: cell for cell in CELLS}
    if names is None:
        return list(CELLS), set()
    split = [split_name(name) for name in names.split(",")]
    for _, cell_id in split:
        if cell_id not in by_id:
            raise UsageError(f"no cell `{cell_id}`{allowed(cell_id, by_id)}")
    return [by_id[cell_id] for _, cell_id in split], {subject for subject, _ in split if subject}
