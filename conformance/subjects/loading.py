"""Names of subjects: `package.module:name`, or `path/to/file.py:name`."""

import importlib
from pathlib import Path
from types import ModuleType

from conformance.importing import load_file
from conformance.subjects.decorated import FunctionSubject
from conformance.subjects.protocol import Subject, SubjectMistake

_NEEDED = ("versions", "unsupported", "model", "batch", "loss", "count", "make_optimizer", "build")


def load_subject(name: str) -> Subject:
    """Import the module of a subject and return the subject; a class is called without arguments.

    Raises SubjectMistake, with what is allowed, for a name that leads to no subject. What the module itself raises
    when it is imported is passed on.
    """
    origin, _, attribute = name.partition(":")
    module = _file(Path(origin)) if origin.endswith(".py") else _module(origin, name)
    found = getattr(module, attribute, None)
    if found is None:
        subjects = [key for key, value in vars(module).items() if isinstance(value, FunctionSubject)]
        known = f"; subjects there: {', '.join(subjects)}" if subjects else ""
        raise SubjectMistake(f"{origin} has no `{attribute}`{known}")
    if isinstance(found, type):
        found = found()
    missing = [needed for needed in _NEEDED if not callable(getattr(found, needed, None))]
    if missing:
        raise SubjectMistake(
            f"{name} is no subject: decorate parallelize(model, mesh, config) with conformance.subjects.subject(...), "
            f"or write a class that has {', '.join(missing)}"
        )
    subject: Subject = found
    return subject


def _module(origin: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(origin)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{origin}.".startswith(f"{error.name}."):
            raise
        raise SubjectMistake(
            f"no module `{error.name}` for {name}: run in its directory, install its package, or give FILE.py:NAME"
        ) from None


def _file(file: Path) -> ModuleType:
    if not file.is_file():
        raise SubjectMistake(f"no file {file}")
    return load_file(file, with_neighbours=True)
