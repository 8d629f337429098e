"""Interfaces of torch: public functions, classes and methods of the measured areas, read from the installed torch."""

import enum
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from conformance.torch_coverage.areas import AREAS, Area, area_of_files, torch_directory

_MAX_ITEMS = 3
"""Number of different items by which a sequence is described."""
_MAX_TEXT = 40
_WRITTEN = (bool, int, float, str, enum.Enum)
"""Types whose values are described by themselves, others by the name of the type."""


@dataclass(frozen=True)
class Parameter:
    """Parameter of a function; `default` is `inspect.Parameter.empty` where there is none."""

    name: str
    default: Any

    @property
    def has_default(self) -> bool:
        """True if calls may leave it out."""
        return self.default is not inspect.Parameter.empty


@dataclass(frozen=True)
class Interface:
    """Public function or method, or the construction of a public class."""

    name: str
    """Public name: module, class and function, or module and class."""
    area: str
    code: CodeType
    parameters: Sequence[Parameter]
    """All but `self` and collections of further arguments."""


@cache
def interfaces() -> list[Interface]:
    """Return all interfaces of the areas, by name; a function with two names has the first one.

    A public name stands in `__all__`, or begins without an underscore in the module that defines it. Functions that
    are written in C have no code of Python and are left out, as is what belongs to files of no area.
    """
    found: dict[CodeType, Interface] = {}
    for area in AREAS:
        for module_name in area.public:
            with suppress(ImportError):
                for each in _interfaces_in_module(area, module_name, importlib.import_module(module_name)):
                    found.setdefault(each.code, each)
    return sorted(found.values(), key=lambda interface: interface.name)


def _interfaces_in_module(area: Area, module_name: str, module: Any) -> Iterator[Interface]:
    listed = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module_name and not name.startswith("_")
        if (name in listed if listed is not None else is_own) and _is_of(area, value):
            yield from _interfaces_in_value(area, f"{module_name}.{name}", value)


def _is_of(area: Area, value: Any) -> bool:
    """Return whether a function or class is of an area: by the file of its code, or by its module for a dataclass."""
    members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    plain = [inspect.unwrap(each) for each in members if callable(each)]
    files = {each.__code__.co_filename for each in plain if isinstance(each, FunctionType)}
    root = f"{torch_directory()}/"
    if any(area_of_files().get(file.removeprefix(root)) == area.name for file in files):
        return True
    return bool(plain) and getattr(value, "__module__", None) in area.public


def _interfaces_in_value(area: Area, name: str, value: Any) -> Iterator[Interface]:
    if inspect.isclass(value):
        if not issubclass(value, (enum.Enum, BaseException)) and not getattr(value, "_is_protocol", False):
            yield from _interfaces_in_class(area, name, value)
    elif callable(value):
        yield from _interfaces_in_function(area, name, value, is_method=False)


def _interfaces_in_class(area: Area, name: str, value: type) -> Iterator[Interface]:
    """Yield the construction and the methods of a class, also those that it has from private classes of the area."""
    members: dict[str, Any] = {}
    for base in value.__mro__:
        if base is value or (base.__name__.startswith("_") and _is_of(area, base)):
            members = {**vars(base), **members}
    for member_name, member in members.items():
        is_static = isinstance(member, staticmethod)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if member_name == "__init__":
            yield from _interfaces_in_function(area, name, function, is_method=True)
        elif not member_name.startswith("_"):
            yield from _interfaces_in_function(area, f"{name}.{member_name}", function, is_method=not is_static)


def _interfaces_in_function(area: Area, name: str, function: Any, *, is_method: bool) -> Iterator[Interface]:
    """Yield a function or method that is written in Python and not abstract."""
    plain = inspect.unwrap(function) if callable(function) else function
    if not isinstance(plain, FunctionType) or getattr(plain, "__isabstractmethod__", False):
        return
    parameters = [*inspect.signature(plain).parameters.values()][is_method:]
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    yield Interface(name, area.name, plain.__code__, [Parameter(each.name, each.default) for each in named])


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value is the default, or equal to it and of its type."""
    if value is default:
        return True
    if type(value) is not type(default) or not isinstance(value, (*_WRITTEN, tuple, list, dict, set, frozenset)):
        return False
    return bool(value == default)


def described(value: Any) -> str:
    """Return a value in short: itself if it is simple, items of a sequence, or the name of its type."""
    if value is None or isinstance(value, _WRITTEN):
        return repr(value)[:_MAX_TEXT]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [*dict.fromkeys(map(described, list(value)[: 4 * _MAX_ITEMS]))]
        return f"[{', '.join(items[:_MAX_ITEMS])}{', ...' * (len(items) > _MAX_ITEMS)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(dict.fromkeys(map(_type_name, list(value.values())[:_MAX_ITEMS])))}}}"
    text = _type_name(value)
    return str(value) if text in ("dtype", "device", "RedOpType") else text


def _type_name(value: Any) -> str:
    return type(value).__name__
