"""`python -m conformance defects`: inject every known fault; is each caught by the laws that must?"""

import argparse
from pathlib import Path

from conformance.cli.command import Answer, Commands, add_profile
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.project import PROJECT, require_checkout
from reference_trainer.checks import UsageError

_DOCS_FILE = PROJECT / "docs" / "kill_matrix.md"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("defects", help="inject every known fault: is each caught by the laws that must?")
    parser.add_argument("id", nargs="*", help="only these defects (default: all)")
    parser.add_argument("--changed-since", metavar="COMMIT", help="only those whose files differ from this commit's")
    add_profile(parser)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, each with its own ranks")
    parser.add_argument("--kernels", default=OWN.kernels, metavar="WHICH", help="as for a session")
    parser.add_argument("--sums", default=OWN.sums, metavar="ORDER", help="as for a session")
    parser.add_argument("--write-docs", action="store_true", help="also write docs/kill_matrix.md")
    parser.add_argument(
        "--report-dir",
        type=Path,
        default=Path("conformance-defects"),
        metavar="DIR",
        help="kill_matrix.json, reused as long as nothing has changed (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Try the defects.

    Raises UsageError for an unknown profile, defect, commit or arithmetic, for a number of workers below 1, for docs of
    some defects only, and outside of a checkout for the docs and for a commit.
    """
    for name, given in {"--write-docs": options.write_docs, "--changed-since": options.changed_since}.items():
        if given:
            require_checkout(name)
    if options.write_docs and (options.id or options.changed_since):
        raise UsageError("--write-docs writes a row for every defect: leave out ids and --changed-since")
    if options.workers < 1:
        raise UsageError(f"--workers {options.workers}: at least 1")
    from conformance.detection.kill_matrix import as_markdown, as_text, changed_since, kill_matrix

    directory: Path = options.report_dir
    only = options.id
    if options.changed_since:
        only = [defect.id for defect in changed_since(options.changed_since) if not only or defect.id in only]
        if not only:
            return Answer(f"no defect has changed since {options.changed_since}", 0)
    matrix = kill_matrix(
        profile=options.profile,
        directory=directory,
        workers=options.workers,
        only=only,
        arithmetic=Arithmetic.parse(kernels=options.kernels, sums=options.sums),
    )
    if options.write_docs:
        _DOCS_FILE.write_text(as_markdown(matrix) + "\n")
    return Answer(as_text(matrix), int(bool(matrix.problems)))
