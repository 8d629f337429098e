"""Modules of trainers that no package installs, from the user's own checkout."""

import os
from pathlib import Path
from types import ModuleType

from conformance.importing import load_file
from conformance.subjects.protocol import SubjectMistake


def module_in_checkout(variable: str, path: str, *, repository: str) -> ModuleType:
    """Return the module of a file in the checkout that a variable names; raises SubjectMistake if there is none."""
    checkout = os.environ.get(variable)
    if checkout is None:
        raise SubjectMistake(f"set {variable} to your checkout of {repository}")
    file = Path(checkout) / path
    if not file.is_file():
        raise SubjectMistake(f"{variable}={checkout} has no file {path}")
    return load_file(file)
