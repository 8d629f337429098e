"""Files of the project that sessions read, read once for all sessions that are forked from a process."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from conformance.judge import waivers
from conformance.judge.waivers import Waiver
from conformance.plan import matrix as matrices
from conformance.plan.coverage import coverage
from conformance.plan.lock import lock_file
from conformance.plan.matrix import Matrix
from conformance.project import data_file

_load_matrix, _load_waivers = matrices.load_matrix, waivers.load_waivers
_matrices: dict[tuple[object, ...], Matrix] = {}
_waivers: dict[tuple[object, ...], list[Waiver]] = {}


def read() -> None:
    """Read the project's files for sessions, which read again only files with another content.

    Modules that are imported later find the functions below in place of those that read each time.
    """
    patch.object(matrices, "load_matrix", load_matrix).start()
    patch.object(waivers, "load_waivers", load_waivers).start()
    matrix = load_matrix(data_file("matrix.yaml"))
    coverage(matrix, matrix.profile_cells("nightly"))
    load_waivers(data_file("waivers.yaml"), matrix)


def load_matrix(file: Path, **options: Any) -> Matrix:
    """Return the matrix of a file."""
    key = (_content(file), _content(lock_file(file)), *options.items())
    if key not in _matrices:
        _matrices[key] = _load_matrix(file, **options)
    return _matrices[key]


def load_waivers(file: Path, matrix: Matrix) -> list[Waiver]:
    """Return the waivers of a file."""
    key = (_content(file), matrix)
    if key not in _waivers:
        _waivers[key] = _load_waivers(file, matrix)
    return _waivers[key]


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""
