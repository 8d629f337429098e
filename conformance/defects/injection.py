"""How a fault gets into a rank process: a name is replaced for the time of one run."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

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
    needs_cuda: bool = False
    """Shows on a CUDA device alone: nothing that runs on the CPU can see it."""
    hangs: bool = False
    """The run never ends: the verdict of its laws is `timeout` instead of `fail`."""


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
