"""Command that repeats a case, for the shell in which the session was started."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.project import LAWS_DIRECTORY, module_of

_REPORT_DIRECTORY = "conformance-report-repro"  # repeating a case must not overwrite the report that it is in


def repeat_command(path: Path, name: str, options: Sequence[str], *, directory: Path) -> str:
    """Return the command that repeats a case, given the path of its file and its name there.

    The node id would not do: outside of pytest's rootdir, as in a wheel, it does not lead to the file.
    """
    test = _test_argument(path, name, directory=directory)
    return shlex.join([*_pytest(directory), "-n0", *options, f"--report-dir={_REPORT_DIRECTORY}", *test])


def _pytest(directory: Path) -> list[str]:
    """Return `pytest`, or the interpreter with `-m pytest` where the shell would find none or that of another one."""
    interpreter = Path(sys.executable)
    found = shutil.which("pytest")
    if found and Path(found).parent == interpreter.parent:
        return ["pytest"]
    below = interpreter.is_relative_to(directory)
    return [str(interpreter.relative_to(directory) if below else interpreter), "-m", "pytest"]


def _test_argument(path: Path, name: str, *, directory: Path) -> list[str]:
    path = path.resolve()
    if path.is_relative_to(directory):
        return [f"{path.relative_to(directory)}::{name}"]
    if path.is_relative_to(LAWS_DIRECTORY):
        return ["--pyargs", f"{module_of(path)}::{name}"]
    return [f"{path}::{name}"]
