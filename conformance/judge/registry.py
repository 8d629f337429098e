"""All laws, and the tests that assert them."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conformance.judge.law import Law, law_of
from conformance.project import LAWS_DIRECTORY, PROJECT, module_of, test_files


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
    """Return all laws by id, found by importing every test module below the laws' directory, which takes torch."""
    functions = [
        function
        for file in test_files(LAWS_DIRECTORY)
        for function in vars(importlib.import_module(module_of(file))).values()
    ]
    return {law.id: AssertedLaw(law, function) for function in functions if (law := law_of(function))}


def law_tests() -> dict[str, Callable[..., None]]:
    """Return the test of each law by id, as a plain function."""
    return {law_id: asserted.test for law_id, asserted in asserted_laws().items()}
