"""Small matrices, each written with its lock file."""

from pathlib import Path

from conformance.matrix_lock.derivation import derive
from conformance.matrix_lock.lock_file import lock_text, planned_cells
from conformance.plan.lock import lock_file
from conformance.plan.matrix import Matrix, load_matrix
from conformance.project import LAWS_DIRECTORY
from reference_trainer.strict_yaml import load


def write_matrix(file: Path, text: str) -> Path:
    """Write a matrix, and its cells in the order of the sections as its lock file; returns the matrix file.

    Raises ConfigError for a mistake in the matrix.
    """
    file.write_text(text)
    document = load(file)
    lock_file(file).write_text(lock_text(document, planned_cells(derive(document))))
    return file


def written_matrix(file: Path, text: str, *, laws_directory: Path = LAWS_DIRECTORY) -> Matrix:
    """Write a matrix with its lock file, and load it."""
    return load_matrix(write_matrix(file, text), laws_directory=laws_directory)
