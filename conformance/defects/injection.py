"""How a fault gets into a rank process: a name is replaced for the time of one run."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from conformance.plan.substrates import REAL, Substrate

Injection = Callable[[], AbstractContextManager[Any]]


class NotInjectable(RuntimeError):
    """The name that a defect replaces is gone from this torch: the defect proves nothing here and must be mended."""


@dataclass(frozen=True)
class Defect:
    """A named fault, with the laws that must catch it and a benign twin that all laws must let pass."""

    id: str
    title: str
    source: str
    """Public thread in which such a fault was reported."""
    mechanism: str
    laws: tuple[str, ...]
    """Each of these must fail on some cell; `hangs` for another verdict."""
    inject: Injection
    inject_twin: Injection
    """The same place changed in a way that is correct."""
    hangs: bool = False
    """The run never ends: the verdict of its laws is `timeout` instead of `fail`."""
    substrates: tuple[Substrate, ...] = REAL
    """Where it shows; laws that hold in simulated worlds are judged there beside any of these."""
    since: str = "2.6"
    """First torch version that it can be injected into."""


def from_file(text: str) -> Any:
    """What `FILE.py:NAME` names: a Defect of a user's own, or a function that returns the context of a fault.

    Raises ValueError if there is no such file or name, if the file cannot be imported, or if it is something else.
    """
    path, _, name = text.rpartition(":")
    file = Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"--defect {text}: no file {file}; write FILE.py:NAME")
    found = getattr(_imported(file), name, None)
    if not isinstance(found, Defect) and not callable(found):
        raise ValueError(f"--defect {text}: {file.name} has no Defect, and no function without arguments, named {name}")
    return found


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"conformance_user_defect_{file.stem}", file)
    assert spec is not None, "a file whose name ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--defect: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def replaced(owner: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `name` of `owner` (`package.module` or `package.module:Class`) by `make(original)`.

    Raises NotInjectable if the owner or the name does not exist.
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
