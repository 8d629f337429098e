"""Injection of faults into a rank process: an attribute of a module or class is replaced while a run lasts."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from conformance.importing import load_file
from conformance.plan.scopes import Trainers
from conformance.plan.substrates import REAL, Substrate
from reference_trainer.checks import UsageError

Injection = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context in which a fault is in force."""


class NotInjectable(RuntimeError):
    """Error of a defect that cannot be injected, for instance because the installed torch lacks what it replaces.

    Such a defect proves nothing until it is mended.
    """


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A named fault, the laws that must catch it, and a benign twin that all laws must let pass."""

    id: str
    title: str
    source: str
    """URL of a public thread in which such a fault was reported, or of the documentation that it contradicts."""
    mechanism: str
    laws: tuple[str, ...]
    """Ids of the laws that must fail on some of the `cells`; `hangs` asks for another verdict."""
    cells: str = ""
    """Selection expression: the smallest cells of matrix.yaml that show the defect to all of its `laws`.

    Empty for a user's own defect, which is injected into any cell.
    """
    subjects: tuple[str, ...] = ()
    """Subjects of sweeps that show the defect: operators, optimizers, modules, or options joined by commas.

    A sweep that has some of them tries no others with the defect, since what is wrong for some fails the sweep of all,
    nor with the twin.
    """
    inject: Injection
    inject_twin: Injection
    """Context of the benign twin, a correct change of the same code."""
    hangs: bool = False
    """True if the run never ends: the verdict of the laws is then `timeout` instead of `fail`."""
    raises: str = ""
    """Type of the exception that is the symptom of the fault, such as `RuntimeError`; empty if ranks finish.

    Any other exception of a rank means that the injection does not fit the code that it replaces.
    """
    substrates: tuple[Substrate, ...] = REAL
    """Substrates that show the defect; laws of simulated worlds are judged on each of these as well."""
    since: str = "2.6"
    """First torch version into which the defect can be injected."""
    of: Trainers = "reference trainer"
    """Trainers that can have the defect; one of any trainer shows on cells of the profile `trainers`."""


def from_file(text: str) -> Any:
    """Load the object that `FILE.py:NAME` names: a user's own Defect, or a function that returns a fault's context.

    Raises UsageError if there is no such file or name, if the file cannot be imported, or if the object is neither.
    """
    path, _, name = text.rpartition(":")
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UsageError(f"--defect {text}: no file {file}; write FILE.py:NAME")
    fault = getattr(_imported(file), name, None)
    if not isinstance(fault, Defect) and not callable(fault):
        raise UsageError(f"--defect {text}: {file.name} has no Defect, and no function without arguments, named {name}")
    return fault


def _imported(file: Path) -> ModuleType:
    try:
        return load_file(file)
    except Exception as error:
        raise UsageError(f"--defect: {file} cannot be imported: {type(error).__name__}: {error}") from error


@contextmanager
def replaced(owner: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the attribute `name` of `owner` (`package.module` or `package.module:Class`) by `make(original)`.

    Raises NotInjectable if the owner or the attribute does not exist.
    """
    module_name, _, class_name = owner.partition(":")
    try:
        target = importlib.import_module(module_name)
        target = getattr(target, class_name) if class_name else target
        original = getattr(target, name)
    except (ImportError, AttributeError) as error:
        raise NotInjectable(f"{owner} has no {name}: {error}") from error
    with patch.object(target, name, make(original)):
        yield


def replaced_call(owner: str, name: str, call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace a callable as `replaced` does: calling it returns `call(original, *args, **kwargs)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # A function, which becomes a method where `owner` is a class; a `partial` would not.
        return lambda *args, **kwargs: call(original, *args, **kwargs)

    return replaced(owner, name, make)


def repeated_call(owner: str, name: str, *, times: int) -> AbstractContextManager[None]:
    """Replace a callable by `times` calls of the original, which return the last result, or None without any call."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = None
        for _ in range(times):
            result = original(*args, **kwargs)
        return result

    return replaced_call(owner, name, call)
