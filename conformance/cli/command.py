"""Declarations, options and answers that commands share."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from conformance.project import data_file
from conformance.pytest_plugin.options import DEFAULT_PROFILE
from reference_trainer.checks import UsageError, positive


class Answer(NamedTuple):
    """Text that a command prints, and its exit status."""

    text: str
    status: int = 0
    """0, or 1 for problems; 4 is that of a UsageError."""


class Parser(argparse.ArgumentParser):
    """Parser that raises UsageError for arguments that are wrong, so that all mistakes are told in the same way.

    Options have to be written out, since an abbreviation changes its meaning with the next option that is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message, and where to look."""
        raise UsageError(f"{message}; see {self.prog} --help")


class Commands(Protocol):
    """Commands of a parser, as `ArgumentParser.add_subparsers` returns them."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """Add a command."""


def add_matrix(parser: argparse.ArgumentParser) -> None:
    """Add the option `--matrix`."""
    parser.add_argument("--matrix", type=Path, default=data_file("matrix.yaml"), metavar="FILE", help="another matrix")


def add_limit(parser: argparse.ArgumentParser, *, of: str, default: float) -> None:
    """Add the option `--limit`, the time that something may take."""
    text = f"seconds for {of} (default: %(default)g)"
    parser.add_argument("--limit", type=seconds, default=default, metavar="S", help=text)


def seconds(text: str) -> float:
    """Return a time in seconds; raises argparse.ArgumentTypeError unless it is positive and finite."""
    value = float(text)
    if not positive(value):
        raise argparse.ArgumentTypeError(f"{text}: write a positive number of seconds")
    return value


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the option `--profile`."""
    parser.add_argument(
        "--profile", default=DEFAULT_PROFILE, metavar="P", help="profile of the matrix (default: %(default)s)"
    )
