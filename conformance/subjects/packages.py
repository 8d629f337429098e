"""Installed packages that a subject is made of, found by the modules that its functions name."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import packages_distributions, version
from types import ModuleType
from typing import Any

import torch

_OWN = ("conformance", "reference_trainer", "torch")
"""Modules at the top level that are no packages of a subject; torch's version is that of the module itself."""


def versions_of(functions: Iterable[Callable[..., Any]], *, packages: Iterable[str] = ()) -> dict[str, str]:
    """Return versions by package: of torch, and of those that define or are named by functions or classes.

    `packages` are further ones. Raises PackageNotFoundError for one of these that is not installed.
    """
    named = {module.partition(".")[0] for function in functions for module in _modules(function)} - {*_OWN}
    distributions = packages_distributions() if named else {}
    found = sorted({*packages, *(each for module in named for each in distributions.get(module, ()))})
    return {"torch": str(torch.__version__), **{package: version(package) for package in found}}


def _modules(function: Callable[..., Any]) -> Iterable[str]:
    """Yield the names of the module of a function or class, and of those of all globals that a function names.

    Of a `partial` they are those of its function.
    """
    if isinstance(function, partial):
        function = function.func
    yield _module_of(function)
    if inspect.isfunction(function):
        yield from map(_module_of, inspect.getclosurevars(function).globals.values())


def _module_of(named: Any) -> str:
    return named.__name__ if isinstance(named, ModuleType) else getattr(named, "__module__", None) or ""
