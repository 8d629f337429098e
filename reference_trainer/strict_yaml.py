"""YAML without surprises: one spelling for every value, and every mistake reported as FILE:LINE.

`load` reads a file into plain Python values and remembers the line of each; `convert` turns them into a typed
msgspec Struct or dataclass. Whatever two YAML readers could understand differently is refused.
"""

import dataclasses
import difflib
import enum
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from reference_trainer.yaml_scalar import Scalar, scalar_value

T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in a configuration file; the message begins with FILE:LINE."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One configuration file as plain values."""

    path: Path
    """The file, as it was given."""
    data: dict[str, Any]
    """The top-level mapping: only dict, list, str, int, float, bool and None."""
    lines: dict[str, int]
    """1-based line of each path such as `$.mesh[2]`: of the value if it is a scalar, else of its key."""

    def error(self, where: str, message: str) -> ConfigError:
        """A ConfigError that begins with the place of the path `where`."""
        headline, *details = message.split("\n")
        located = f"{self.place(where)}: {headline} - at `{where}`"
        return ConfigError("\n".join([located, *details]))

    def place(self, where: str) -> str:
        """FILE:LINE of the path `where`, or of its nearest parent that has a line."""
        known = where
        while known not in self.lines:
            known = known[: max(known.rfind("."), known.rfind("["), 0)] or "$"
        return f"{self.path}:{self.lines[known]}"


def load(path: Path) -> Document:
    """Reads one mapping from a file.

    Raises ConfigError for an unreadable file, a syntax error, a second document, a duplicate or non-string key, an
    anchor, alias, tag or merge key, and a scalar that is not in its canonical spelling.
    """
    text = _read(path)
    try:
        root = yaml.compose(text, _Loader)
        reader = _Reader(path)
        if not isinstance(root, yaml.MappingNode):
            line = root.start_mark.line + 1 if root else 1
            raise ConfigError(f"{path}:{line}: the top level must be a mapping: write `name: value` lines")
        reader.lines["$"] = root.start_mark.line + 1
        return Document(path=path, data=reader.mapping(root, "$"), lines=reader.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: character U+{error.character:04X} is not allowed: remove it") from None
    except RecursionError:
        raise ConfigError(f"{path}:1: nested too deeply: write fewer levels") from None


def parse_scalar(text: str) -> Scalar:
    """The value of `text` as if it stood in a file, for example behind `name: `.

    Raises ValueError, with what to write, if it is not one scalar in its canonical spelling.
    """
    if not text.strip():
        return None
    try:
        node = yaml.compose(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        node = None
    # Nothing may stand around the scalar: as a comment, the end of a value such as `runs/a #1` would be lost.
    if not isinstance(node, yaml.ScalarNode) or (text[: node.start_mark.index] + text[node.end_mark.index :]).strip():
        raise ValueError(f"`{text}` is not one plain value: write a single value, or quote it if it is a string")
    return scalar_value(node)


def convert(document: Document, type_: type[T]) -> T:
    """Converts the document to a Struct or dataclass, strictly.

    Raises ConfigError at the line of the value that does not fit, or of a key that is no field of its type.
    """
    # Innermost parts come first, so that the first error is the most precise one: msgspec does not name map keys.
    for where, value, part in _parts(document.data, type_, "$"):
        _check(document, where, value, part)
    return msgspec.convert(document.data, type_, strict=True)


def explain(error: msgspec.ValidationError, value: object, type_: Any) -> str:
    """Why msgspec refused a value for `type_`, and the allowed values where the type lists any."""
    problem, _, _ = str(error).partition(" - at `")
    options = _options(type_)
    if not any(map(_choices, options)):
        return problem
    return problem + allowed(str(value), [name for option in options for name in _choices(option) or [_name(option)]])


def allowed(given: str, names: Iterable[str]) -> str:
    """The end of a message: the names that are allowed, and the one that was probably meant."""
    names = list(names)
    near = difflib.get_close_matches(given, names, n=1)
    return f"; allowed: {', '.join(names)}" + (f" (did you mean `{near[0]}`?)" if near else "")


# --- from text to plain values ---------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}:1: cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: save the file as UTF-8") from None


class _Loader(yaml.SafeLoader):
    """Composes nodes, and refuses what makes a value depend on another place of the file or on a type's name."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "anchors, aliases and tags are not supported: write the value itself, or quote it"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Reader:
    """Turns nodes into plain values and notes the line of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, int] = {}

    def value(self, node: yaml.Node, where: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self.entry(item, item, f"{where}[{index}]") for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), "YAML has no other kind of node"
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, where: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key in result:
                raise self.error(key_node, f"duplicate key `{key}`: keep one of them")
            result[key] = self.entry(key_node, value_node, f"{where}.{key}")
        return result

    def entry(self, start: yaml.Node, node: yaml.Node, where: str) -> Any:
        self.lines[where] = (node if isinstance(node, yaml.ScalarNode) else start).start_mark.line + 1
        return self.value(node, where)

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, "a key must be a string, not a list or a mapping: write a name")
        if node.value == "<<" and node.style is None:
            raise self.error(node, "merge keys `<<` are not supported: write the keys out")
        key = self.scalar(node)
        if not isinstance(key, str):
            raise self.error(node, f"the key `{node.value}` is not a string: write a name, or quote it")
        return key

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        try:
            return scalar_value(node)
        except ValueError as error:
            raise self.error(node, str(error)) from None

    def error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(f"{self.path}:{node.start_mark.line + 1}: {message}")


# --- from plain values to types --------------------------------------------------------------------------------------


def _check(document: Document, where: str, value: Any, type_: Any) -> None:
    """Raises ConfigError if the value has a key that its type does not, or does not convert."""
    records = [fields for option in _options(type_) if (fields := _fields(option)) is not None]
    if isinstance(value, dict) and len(records) == 1:
        for key in (key for key in value if key not in records[0]):
            raise document.error(f"{where}.{key}", f"unknown field `{key}`{allowed(key, records[0])}")
    try:
        msgspec.convert(value, type_, strict=True)
    except msgspec.ValidationError as error:
        inside = re.search(r" - at `\$([^`]*)`$", str(error))
        raise document.error(where + (inside[1] if inside else ""), explain(error, value, type_)) from None


def _parts(value: Any, type_: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and type of each part of a value, innermost first, the whole last."""
    fitting = [members for option in _options(type_) if (members := _members(value, option)) is not None]
    # With two types that fit, only msgspec knows which is meant: their parts are then left to it.
    for suffix, member, member_type in fitting[0] if len(fitting) == 1 else []:
        yield from _parts(member, member_type, where + suffix)
    yield where, value, type_


def _members(value: Any, type_: Any) -> list[tuple[str, Any, Any]] | None:
    """Path suffix, value and type of each direct part; None if `type_` is not a container like `value`."""
    origin, args = get_origin(type_) or type_, get_args(type_)
    if isinstance(value, dict) and (fields := _fields(origin)) is not None:
        return [(f".{key}", value[key], fields[key]) for key in value if key in fields]
    if isinstance(value, dict) and origin is dict and args:
        return [(f".{key}", part, kind) for key in value for part, kind in ((key, args[0]), (value[key], args[1]))]
    if isinstance(value, list) and origin in (list, tuple, set, frozenset) and args:
        kinds = args if origin is tuple and args[-1] is not ... else itertools.repeat(args[0])
        return [(f"[{index}]", part, kind) for index, (part, kind) in enumerate(zip(value, kinds, strict=False))]
    return None


def _fields(type_: Any) -> dict[str, Any] | None:
    """Name and type of each field of a Struct or dataclass; None for other types."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        hints = get_type_hints(type_, include_extras=True)
        return {field.name: hints[field.name] for field in dataclasses.fields(type_)}
    return None


def _options(type_: Any) -> list[Any]:
    """The members of a union, or the type itself; Annotated is taken off."""
    origin = get_origin(type_)
    if origin is Annotated:
        return _options(get_args(type_)[0])
    if origin in (Union, types.UnionType):
        return [option for member in get_args(type_) for option in _options(member)]
    return [type_]


def _choices(type_: Any) -> list[str]:
    """The values of a Literal or an Enum as text; empty for other types."""
    if get_origin(type_) is Literal:
        return [str(value) for value in get_args(type_)]
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        return [str(member.value) for member in type_]
    return []


def _name(type_: Any) -> str:
    origin = get_origin(type_) or type_
    return "null" if origin is types.NoneType else str(origin.__name__)
