"""Declarations, options and answers that commands share."""

import argparse
from pathlib import Path
from typing import NamedTuple, Protocol

from conformance.project import PROJECT
from conformance.pytest_plugin.plugin import DEFAULT_PROFILE


class Answer(NamedTuple):
    """Text that a command prints, and its exit status."""

    text: str
    status: int = 0
    """0, or 1 for problems; 2 is that of a ValueError, for what cannot be used."""


class Commands(Protocol):
    """Commands of a parser, as `ArgumentParser.add_subparsers` returns them."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """Add a command."""


def add_matrix(parser: argparse.ArgumentParser) -> None:
    """Add the option `--matrix`."""
    parser.add_argument("--matrix", type=Path, default=PROJECT / "matrix.yaml", metavar="FILE", help="another matrix")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the option `--profile`."""
    parser.add_argument(
        "--profile", default=DEFAULT_PROFILE, metavar="P", help="profile of the matrix (default: %(default)s)"
    )
