"""Functions of torch that are replaced while an owner's loop runs, also where modules have imported them by name."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


@contextmanager
def replaced_everywhere(replacements: Mapping[Function, Function]) -> Iterator[None]:
    """Open a context in which modules have other functions in place of some.

    Names are looked for in all modules that are loaded now; a module that is loaded inside of the context imports the
    replacements, and gets the original functions at its end.
    """
    _exchange(replacements)
    try:
        yield
    finally:
        _exchange({replacement: original for original, replacement in replacements.items()})


def _exchange(replacements: Mapping[Function, Function]) -> None:
    by_id = {id(found): (found, replacement) for found, replacement in replacements.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)][1]
