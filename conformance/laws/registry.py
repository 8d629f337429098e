"""All laws, and the tests that assert them."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import conformance.laws
from conformance.judge.law import Law, law_of
from conformance.project import PROJECT


@dataclass(frozen=True)
class AssertedLaw:
    """Law with the test that asserts it."""

    law: Law
    test: Callable[..., None]

    @property
    def where(self) -> str:
        """Place of the test, `FILE:LINE FUNCTION`, with the file below the project's directory."""
        file = Path(inspect.getfile(self.test)).relative_to(PROJECT)
        return f"{file}:{self.test.__code__.co_firstlineno} {self.test.__name__}"


@cache
def asserted_laws() -> dict[str, AssertedLaw]:
    """Return all laws by id, found by importing every test module of this package, which takes torch."""
    modules = [name for _, name, _ in pkgutil.iter_modules(conformance.laws.__path__) if name.startswith("test_")]
    functions = [
        function
        for name in modules
        for function in vars(importlib.import_module(f"{conformance.laws.__name__}.{name}")).values()
    ]
    return {law.id: AssertedLaw(law, function) for function in functions if (law := law_of(function))}


def law_tests() -> dict[str, Callable[..., None]]:
    """Return the test of each law by id, as a plain function."""
    return {law_id: asserted.test for law_id, asserted in asserted_laws().items()}
