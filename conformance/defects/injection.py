"""Injection of faults into a rank process: an attribute of a module or class is replaced while a run lasts."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from conformance.importing import load_file
from conformance.plan.scopes import Trainers
from conformance.plan.substrates import REAL, Substrate
from reference_trainer.checks import UsageError

Injection = AbstractContextManager[Any]
"""Context in which a fault, or its benign twin, is injected."""
Call = Callable[..., Any]
"""Function of torch or of the trainer that a fault replaces."""
GITHUB = "https://github.com/"


class NotInjectable(RuntimeError):
    """Error of a defect that cannot be injected, for instance because the installed torch lacks the replaced code.

    Such a defect proves nothing until it is fixed.
    """


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A named fault, the laws that must catch it, and a benign twin that all laws must let pass."""

    id: str
    why: str
    """One sentence: the wrong behaviour, and its cause where the behaviour does not say it."""
    source: str
    """URL of a public thread in which such a fault was reported, or of the documentation that it contradicts."""
    laws: tuple[str, ...]
    """Ids of the laws that must fail on some of the `cells`; `hangs` asks for another verdict."""
    cells: str = ""
    """Selection expression: the smallest cells of matrix.yaml that show the defect to all of its `laws`.

    Empty for a user's own defect, which is injected into any cell.
    """
    inject: Callable[[bool], Injection]
    """Function that returns the context of the fault, or with True that of its benign twin.

    The twin is a correct change of the same code.
    """
    subjects: tuple[str, ...] = ()
    """Subjects of sweeps that show the defect: operators, optimizers, modules, or options joined by commas.

    With this defect or its twin, a sweep tries only these subjects: one faulty operator would otherwise fail the whole
    sweep.
    """
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
    turns: bool = False
    """True if only a trainer whose optimizers take turns can have it, see `conformance.subjects.turns`."""
    of: Trainers = "reference trainer"
    """Trainers that can have the defect; one of any trainer shows on cells of the profile `trainers`."""


def defect(laws: str, cells: str, source: str, **fields: Any) -> Callable[[Callable[[bool], Injection]], Defect]:
    """Make a Defect of the function below: its name is the id, the first paragraph of its docstring is `why`.

    The function gets True for the benign twin. `laws` are ids between spaces; a source without a scheme is a path on
    github.com, such as `pytorch/pytorch/issues/1`. `fields` are further fields of the Defect.
    """

    def declare(inject: Callable[[bool], Injection]) -> Defect:
        return Defect(
            id=inject.__name__.replace("_", "-"),
            why=" ".join((inspect.getdoc(inject) or "").partition("\n\n")[0].split()),
            source=source if "://" in source else GITHUB + source,
            laws=tuple(laws.split()),
            cells=cells,
            inject=inject,
            **fields,
        )

    return declare


def instead_of(owner: str, name: str) -> Callable[[Callable[..., Any]], Callable[[bool], Injection]]:
    """Inject the function below in place of a callable, see `replaced`.

    Each call of the callable becomes `function(benign, original, *args, **kwargs)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[bool], Injection]:
        @wraps(function)
        def inject(benign: bool) -> Injection:
            return replaced_call(owner, name, partial(function, benign))

        return inject

    return decorate


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


def replaced_call(owner: str, name: str, call: Callable[..., Any]) -> Injection:
    """Replace a callable as `replaced` does: calling it returns `call(original, *args, **kwargs)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # A function, which becomes a method where `owner` is a class; a `partial` would not.
        return lambda *args, **kwargs: call(original, *args, **kwargs)

    return replaced(owner, name, make)


def repeated_call(owner: str, name: str, *, times: int) -> Injection:
    """Replace a callable by `times` calls of the original, which return the last result, or None without any call."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = None
        for _ in range(times):
            result = original(*args, **kwargs)
        return result

    return replaced_call(owner, name, call)
