"""`python -m conformance site OUT DIR...`: a static site of many reports."""

import argparse
from pathlib import Path

from conformance.cli.command import Answer, Commands
from conformance.report.schema import read_report
from conformance.report.wording import counted
from reference_trainer.checks import UsageError, require


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("site", help="a static site of many reports: versions and devices as columns")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the site, which is made")
    parser.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    parser.add_argument("--kill-matrix", type=Path, metavar="FILE", help="also show this table of defects, in Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Write the site.

    Raises UsageError if a report or the table of defects cannot be read, if none is about the reference trainer, and if
    the site cannot be written.
    """
    from conformance.site.pages import site_files

    reports = [read_report(directory) for directory in options.report_dir]
    table: Path | None = options.kill_matrix
    require(table is None or table.is_file(), f"--kill-matrix {table}: no such file")
    files = site_files(reports, kill_matrix=table.read_text() if table else "")
    out: Path = options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_text(content)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}: name a directory that you may write") from None
    size_kib = sum(len(content.encode()) for content in files.values()) // 1024
    return Answer(f"written: {out / 'index.html'}: {counted(len(reports), 'report')}, {size_kib} KiB")
