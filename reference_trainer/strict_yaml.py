"""YAML without surprises: ambiguous values are refused, and every mistake is reported as FILE:LINE.

`load` reads a file into plain Python values and remembers the line of each; `convert` turns them into a typed msgspec
Struct or dataclass. The library reads YAML 1.2, in which `1e-3` is a number; other text that Python reads as a number,
such as `.5e3`, is a number, too. Refused are scalars without quotes that a reader of YAML 1.1 reads differently, such
as `on` or `010`, and constructs by which a value depends on another line: anchors, aliases, tags and merge keys. A
version such as `2.10` is a number, which no field for text accepts without quotes.
"""

import copy
import dataclasses
import difflib
import enum
import itertools
import math
import re
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, Event
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from reference_trainer.checks import UsageError

T = TypeVar("T")
Scalar = str | int | float | bool | None

_TRAPS = {
    # on
    r"(?i:y|yes|on)": "is true in YAML 1.1 and a word in YAML 1.2: write true",
    # off
    r"(?i:n|no|off)": "is false in YAML 1.1 and a word in YAML 1.2: write false",
    # 010
    r"[-+]?0[0-9_]+": "is octal in YAML 1.1 and decimal in YAML 1.2: write it without the leading zero",
    # 1:30
    r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?": "is a number to base 60 in YAML 1.1: write a decimal number",
    # 0b11
    r"[-+]?0b[01_]+": "is a binary number in YAML 1.1 and a word in YAML 1.2: write a decimal number",
    # 1_000
    r"(?=[-+.0-9].*_)[-+]?(0x[0-9a-fA-F_]*|[0-9_]*\.?[0-9_]*([eE][-+]?[0-9]+)?)": (
        "is a number in YAML 1.1 and a word in YAML 1.2: write it without `_`"
    ),
}
"""Ambiguous scalars without quotes: an example, the pattern, and the reason."""


class ConfigError(UsageError):
    """Mistake in a configuration file; the message begins with FILE:LINE."""


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
        """Return a ConfigError that begins with the location of the path `where`."""
        headline, *details = message.split("\n")
        located = f"{self.location(where)}: {headline} - at `{where}`"
        return ConfigError("\n".join([located, *details]))

    def location(self, where: str) -> str:
        """Return FILE:LINE of the path `where`, or of its nearest parent that has a line."""
        known = where
        while known not in self.lines:
            known = known[: max(known.rfind("."), known.rfind("["), 0)] or "$"
        return f"{self.path}:{self.lines[known]}"


def load(path: Path) -> Document:
    """Read one mapping from a file.

    Raises ConfigError for an unreadable file, a syntax error, a second document, a duplicate or non-string key, an
    anchor, alias, tag or merge key, and an ambiguous scalar.
    """
    text = _read(path)
    yaml = _yaml()
    try:
        root = yaml.compose(text)
        if not isinstance(root, MappingNode):
            line = root.start_mark.line + 1 if root else 1
            raise ConfigError(f"{path}:{line}: the top level must be a mapping: write `name: value` lines")
        data = yaml.constructor.mapping(root, "$")
        return Document(path=path, data=data, lines={"$": root.start_mark.line + 1, **yaml.constructor.lines})
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ": ".join(text for text in (error.context, error.problem) if text)
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {problem}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: character U+{error.character:04X} is not allowed: remove it") from None
    except RecursionError:
        raise ConfigError(f"{path}:1: nested too deeply: write fewer levels") from None


def parse_scalar(text: str) -> Scalar:
    """Return the value of `text` as if it stood in a file, for example behind `name: `.

    Raises UsageError, with the remedy, if it is not one scalar, or ambiguous.
    """
    if not text.strip():
        return None
    yaml = _yaml()
    try:
        node = yaml.compose(text)
    except (YAMLError, RecursionError):
        node = None
    # Nothing may stand around the scalar: as a comment, the end of a value such as `runs/a #1` would be lost.
    if not isinstance(node, ScalarNode) or (text[: node.start_mark.index] + text[node.end_mark.index :]).strip():
        raise UsageError(f"`{text}` is not one plain value: quote a string, and put a list or a table into the file")
    try:
        value: Scalar = yaml.constructor.scalar(node)
    except MarkedYAMLError as error:
        raise UsageError(error.problem) from None
    return value


def convert(document: Document, type_: type[T]) -> T:
    """Convert the document to a Struct or dataclass, strictly.

    Raises ConfigError at the line of the value that does not fit, or of a key that is no field of its type.
    """
    # Innermost values come first, so that the first error is the most precise one: msgspec does not name map keys.
    for where, value, value_type in _nested(document.data, type_, "$"):
        _check(document, where, value, value_type)
    return msgspec.convert(document.data, type_, strict=True)


def explain(error: msgspec.ValidationError, value: object, type_: Any) -> str:
    """Return why msgspec refused a value for `type_`, and the allowed values where the type lists any."""
    problem, _, _ = str(error).partition(" - at `")
    options = _options(type_)
    if not any(map(_choices, options)):
        return problem + (": put the value in quotes" if str in options and isinstance(value, int | float) else "")
    return problem + allowed(str(value), [name for option in options for name in _choices(option) or [_name(option)]])


def allowed(given: str, names: Iterable[str]) -> str:
    """Return the end of a message: the allowed names, and the most similar one."""
    names = list(names)
    near = difflib.get_close_matches(given, names, n=1)
    return f"; allowed: {', '.join(names)}" + (f" (did you mean `{near[0]}`?)" if near else "")


# --- from text to plain values ---------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    if path.exists() and not (path.is_file() or path.is_dir()):  # processes read it again, and a pipe would wait
        raise ConfigError(f"{path}:1: cannot be read: neither a file nor a link to one: save the content in a file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}:1: cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8: save the file as UTF-8") from None


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = _Composer, _Constructor
    return yaml


class _Composer(Composer):
    """Refuses constructs by which a value depends on another line of the file or on a type's name."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent) or event.anchor or event.tag:
            raise _mistake(event, "anchors, aliases and tags are not supported: write the value itself, or quote it")
        return super().compose_node(parent, index)


class _Constructor(SafeConstructor):
    """Turns nodes into plain values and notes the line of each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines: dict[str, int] = {}

    def mapping(self, node: MappingNode, where: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key in result:
                raise _mistake(key_node, f"duplicate key `{key}`: keep one of them")
            result[key] = self.entry(key_node, value_node, f"{where}.{key}")
        return result

    def key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise _mistake(node, "a key must be a string, not a list or a mapping: write a name")
        if node.value == "<<" and node.style is None:
            raise _mistake(node, "merge keys `<<` are not supported: write the keys out")
        key = self.scalar(node)
        if not isinstance(key, str):
            raise _mistake(node, f"the key `{node.value}` is not a string: write a name, or quote it")
        return key

    def entry(self, start: Node, node: Node, where: str) -> Any:
        """Note the line of a scalar, or of the key of a container, and return the value."""
        self.lines[where] = (node if isinstance(node, ScalarNode) else start).start_mark.line + 1
        if isinstance(node, MappingNode):
            return self.mapping(node, where)
        if isinstance(node, SequenceNode):
            return [self.entry(item, item, f"{where}[{index}]") for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode), "YAML has no other kind of node"
        return self.scalar(node)

    def scalar(self, node: ScalarNode) -> Scalar:
        """Return the value; raises an error for an ambiguous one without quotes, or one that is not finite."""
        text: str = node.value
        if node.style is not None:
            return text
        for pattern, problem in _TRAPS.items():
            if re.fullmatch(pattern, text):
                raise _mistake(node, f"`{text}` {problem}, or quote it if it is a string")
        try:
            value: Scalar = self.construct_object(node)
        except ValueError as error:  # Python limits the digits of an int
            raise _mistake(node, str(error)) from None
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise _mistake(node, f"`{text}` is not a finite number: write one, or quote it if it is a string")
        return value


# All that is neither null, boolean nor number is text, dates included.
_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)
_Constructor.add_constructor(None, SafeConstructor.construct_yaml_str)


def _mistake(at: Node | Event, problem: str) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


# --- from plain values to types --------------------------------------------------------------------------------------


def _check(document: Document, where: str, value: Any, type_: Any) -> None:
    """Raise ConfigError if the value has a key that its type does not, or does not convert."""
    records = [fields for option in _options(type_) if (fields := _fields(option)) is not None]
    if isinstance(value, dict) and len(records) == 1:
        for key in (key for key in value if key not in records[0]):
            raise document.error(f"{where}.{key}", f"unknown field `{key}`{allowed(key, records[0])}")
    try:
        msgspec.convert(value, type_, strict=True)
    except msgspec.ValidationError as error:
        inside = re.search(r" - at `\$([^`]*)`$", str(error))
        raise document.error(where + (inside[1] if inside else ""), explain(error, value, type_)) from None


def _nested(value: Any, type_: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and type of all nested values, innermost first, the value itself last."""
    fitting = [members for option in _options(type_) if (members := _members(value, option)) is not None]
    # With two types that fit, only msgspec knows which is meant: their members are then left to it.
    for suffix, member, member_type in fitting[0] if len(fitting) == 1 else []:
        yield from _nested(member, member_type, where + suffix)
    yield where, value, type_


def _members(value: Any, type_: Any) -> list[tuple[str, Any, Any]] | None:
    """Path suffix, value and type of each direct member; None if `type_` is not a container like `value`."""
    origin, args = get_origin(type_) or type_, get_args(type_)
    if isinstance(value, dict) and (fields := _fields(origin)) is not None:
        return [(f".{key}", value[key], fields[key]) for key in value if key in fields]
    if isinstance(value, dict) and origin is dict and args:
        return [(f".{key}", member, kind) for key in value for member, kind in ((key, args[0]), (value[key], args[1]))]
    if isinstance(value, list) and origin in (list, tuple, set, frozenset) and args:
        kinds = args if origin is tuple and args[-1] is not ... else itertools.repeat(args[0])
        return [(f"[{index}]", member, kind) for index, (member, kind) in enumerate(zip(value, kinds, strict=False))]
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


@dataclasses.dataclass(frozen=True)
class _Overridden(Document):
    """Document of which some values came from the command line, and whose errors say so."""

    origins: dict[str, str]
    """Option that gave each path: `--set mesh.tp=2` that of `$.mesh.tp`."""

    def location(self, where: str) -> str:
        """Return the option that gave the value, else FILE:LINE; then the options that gave values below it."""
        own = self.origins.get(where) or super().location(where)
        below = [option for path, option in self.origins.items() if path.startswith(f"{where}.")]
        return " with ".join(dict.fromkeys([own, *below]))


def override(document: Document, assignments: Iterable[str]) -> Document:
    """Return the document with each `section.field=value` set, one after the other; missing sections are added.

    Raises ConfigError, beginning with the option, for an assignment that is not of this form.
    """
    result = _Overridden(document.path, copy.deepcopy(document.data), document.lines, origins={})
    for assignment in assignments:
        option = f"--set {assignment}"
        key, separator, text = assignment.partition("=")
        names = key.split(".")
        if not separator or not all(names):
            raise ConfigError(f"{option}: write KEY=VALUE, for example mesh.tp=2")
        try:
            value = parse_scalar(text)
        except UsageError as error:
            raise ConfigError(f"{option}: {error}") from None
        _assign(result, names, value, option)
    return result


def _assign(document: _Overridden, names: list[str], value: Any, option: str) -> None:
    section, where = document.data, "$"
    for name in names[:-1]:
        where += f".{name}"
        if name not in section:
            section[name] = {}
            document.origins[where] = option
        section = section[name]
        if not isinstance(section, dict):
            field = where.removeprefix("$.")
            raise ConfigError(f"{option}: {field} is a value, not a section: write {field}=VALUE")
    section[names[-1]] = value
    document.origins[f"{where}.{names[-1]}"] = option
