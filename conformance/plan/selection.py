"""Languages that select cells and laws: `--cells EXPR` and `--laws IDS`, `cells:` in matrix.yaml and waivers.yaml.

Cells: `mesh in (dp2, dp2-tp2) and not compile = true`, `tp > 1`; a word that stands alone is an id or a pattern of ids,
`dp2-fp32-*` for `id = dp2-fp32-*`. Laws: `PAR-1,CLIP-*`.
"""

import difflib
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import lark
import msgspec

from conformance.plan.cells import AxisValue, Cell, axis_choices, axis_names, axis_value
from conformance.plan.mesh import AxisError
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

Facts = Mapping[str, AxisValue]
Predicate = Callable[[Facts], bool]

_GRAMMAR = r"""
    ?either: both ("or" both)*
    ?both: negated ("and" negated)*
    ?negated: "not" negated -> negate
            | "(" either ")"
            | WORD OPERATOR WORD -> compare
            | WORD "in" words -> is_in
            | WORD "not" "in" words -> is_not_in
            | WORD -> has_id
    words: "(" WORD ("," WORD)* ")"
    OPERATOR: "=" | "!=" | "<=" | "<" | ">=" | ">"
    WORD: /[A-Za-z0-9_.+*-]+/
    %ignore /\s+/
"""
_HELP = "write comparisons such as `mesh = dp2`, `tp > 1`, `clip in (0, 1)`, joined by and, or, not and parentheses"
_EQUALITIES: dict[str, Callable[[Any, Any], bool]] = {"=": operator.eq, "!=": operator.ne}
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_DEFAULTS = {name: msgspec.json.encode(value).decode().strip('"') for name, value in Cell().facts().items()}
"""Facts of a cell as an expression spells them."""
_TYPES = {name: type(value) for name, value in Cell().facts().items()}


_WORD = re.compile(r"[A-Za-z0-9_.+*-]+")
_NAMED = re.compile(r"([A-Za-z0-9_]+)\s*(?:[=<>]|!=|(?:not\s+)?in\s*\()")


class SelectionError(UsageError):
    """Expression that cannot be compiled; the message points at the mistake with a caret."""


@dataclass(frozen=True)
class Selection:
    """Selection of cells; a call with a cell returns whether the cell is selected."""

    text: str
    """Expression as the user wrote it."""
    predicate: Predicate = field(repr=False, compare=False)
    """Compiled expression, a predicate on the facts of a cell."""

    @property
    def names(self) -> frozenset[str]:
        """Axes and derived facts that the expression asks for; a word that stands alone asks for `id`."""
        return frozenset(_NAMED.findall(self.text)) or frozenset({"id"})

    @property
    def ids(self) -> list[str]:
        """Ids of cells, without patterns, in the order of the expression: no other word has as many hyphens."""
        hyphens = _DEFAULTS["id"].count("-")
        return [word for word in _WORD.findall(self.text) if word.count("-") >= hyphens and "*" not in word]

    def __call__(self, cell: Cell) -> bool:
        """Return whether the cell is selected."""
        return self.holds(cell.facts())

    def holds(self, facts: Facts) -> bool:
        """Return whether a cell with these facts is selected."""
        return self.predicate(facts)


def parse(text: str) -> Selection:
    """Compile an expression.

    Raises SelectionError for a syntax error, an unknown name, a value that the fact cannot have, an order comparison of
    a fact that is not a number, and a pattern with `*` anywhere but after `=`.
    """
    try:
        # The parser applies _Compiler as it goes, and so returns a predicate instead of a tree.
        predicate: Any = _PARSER.parse(text)
    except _Mistake as mistake:
        raise _error(text, mistake.position, str(mistake)) from None
    except lark.UnexpectedToken as error:
        if error.token.type == "$END":
            raise _error(text, len(text), f"the expression ends too early; {_HELP}") from None
        raise _error(text, error.token.start_pos or 0, f"`{error.token}` cannot stand here; {_HELP}") from None
    except lark.UnexpectedCharacters as error:
        raise _error(text, cast("int", error.pos_in_stream), f"`{error.char}` cannot stand here; {_HELP}") from None
    return Selection(text=text, predicate=predicate)


def parse_laws(text: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the known laws that ids or patterns name, in the order of `known`.

    Ids and patterns such as `CLIP-*` are separated by commas or spaces; case does not matter. Raises UsageError for one
    that matches no law, and if there are none.
    """
    in_case = str.upper if any(law[:1].isupper() for law in known) else str.lower
    patterns = [in_case(pattern) for pattern in re.split(r"[,\s]+", text) if pattern]
    if not patterns:
        raise UsageError("no law is named: write ids or patterns, such as `PAR-1,CLIP-*`")
    for pattern in patterns:
        if not any(fnmatchcase(law, pattern) for law in known):
            groups = dict.fromkeys(f"{law.partition('-')[0]}-*" if law[:1].isupper() else law for law in known)
            raise UsageError(f"no law matches `{pattern}`{allowed(pattern, groups)}")
    return tuple(law for law in known if any(fnmatchcase(law, pattern) for pattern in patterns))


def nearest(given: str, ids: Iterable[str]) -> list[str]:
    """Return up to three ids that are spelled nearly as the given one, or else contain it; case does not matter."""
    names, lower = {name.lower(): name for name in ids}, given.lower()
    near = difflib.get_close_matches(lower, names, n=3) or [name for name in names if lower in name][:3]
    return [names[name] for name in near]


def _error(text: str, position: int, problem: str) -> SelectionError:
    line = "".join(" " if letter.isspace() else letter for letter in text)
    return SelectionError(f"{problem}\n  {line}\n  {' ' * position}^")


class _Mistake(Exception):
    """Token with a wrong meaning."""

    def __init__(self, token: lark.Token, message: str) -> None:
        super().__init__(message)
        self.position = token.start_pos or 0


@lark.v_args(inline=True)
class _Compiler(lark.Transformer[lark.Token, Predicate]):
    """Compiler of each rule of the grammar into a predicate.

    Predicates look up facts by plain strings: tokens compare slowly.
    """

    def either(self, *operands: Predicate) -> Predicate:
        return functools.reduce(lambda left, right: lambda facts: left(facts) or right(facts), operands)

    def both(self, *operands: Predicate) -> Predicate:
        return functools.reduce(lambda left, right: lambda facts: left(facts) and right(facts), operands)

    def negate(self, holds: Predicate) -> Predicate:
        return lambda facts: not holds(facts)

    def compare(self, name: lark.Token, sign: lark.Token, word: lark.Token) -> Predicate:
        if sign in _ORDERS:
            return _ordered(name, sign, word)
        if sign == "=" and "*" in word:
            return _matching(name, word)
        holds, fact, expected = _EQUALITIES[sign], str(name), _value(name, word)
        return lambda facts: holds(facts[fact], expected)

    def has_id(self, word: lark.Token) -> Predicate:
        _require_id(word)
        pattern = str(word)
        return lambda facts: fnmatchcase(str(facts["id"]), pattern)

    def words(self, *words: lark.Token) -> tuple[lark.Token, ...]:
        return words

    def is_in(self, name: lark.Token, words: tuple[lark.Token, ...]) -> Predicate:
        fact, values = str(name), tuple(_value(name, word) for word in words)
        return lambda facts: facts[fact] in values

    def is_not_in(self, name: lark.Token, words: tuple[lark.Token, ...]) -> Predicate:
        return self.negate(self.is_in(name, words))


def _require_id(word: lark.Token) -> None:
    """Raise _Mistake for a word that can be neither the id of a cell nor a pattern of ids."""
    if word in _TYPES:
        raise _Mistake(word, f"`{word}` needs a value; write a comparison such as `{word} = {_DEFAULTS[word]}`")
    if word != word.lower():
        raise _Mistake(word, f"`{word}` is no id of a cell: these have no capitals; laws are selected by --laws")
    if "*" not in word and word.count("-") < _DEFAULTS["id"].count("-"):
        axis = next((name for name in axis_names() if _has_value(name, word)), None)
        meant = f"`{axis} = {word}`" if axis else "a comparison"
        raise _Mistake(word, f"`{word}` is no id of a cell, such as {_DEFAULTS['id']}; write {meant}, or `{word}*`")


def _has_value(axis: str, value: object) -> bool:
    try:
        axis_value(axis, value)
    except AxisError:
        return False
    return True


def _ordered(name: lark.Token, sign: lark.Token, word: lark.Token) -> Predicate:
    if _type(name) not in (int, float):
        raise _Mistake(sign, f"`{name}` is not a number and has no order; use =, != or in (...)")
    holds, fact, bound = _ORDERS[sign], str(name), _literal(name, word)
    return lambda facts: holds(facts[fact], bound)


def _matching(name: lark.Token, pattern: lark.Token) -> Predicate:
    if _type(name) is not str:
        raise _Mistake(pattern, f"`{name}` is not a string and cannot match a pattern with `*`; write a value")
    choices = [str(choice) for choice in axis_choices(name)]
    if choices and not any(fnmatchcase(choice, pattern) for choice in choices):
        raise _Mistake(pattern, f"`{pattern}` matches no value of `{name}`{allowed(pattern, choices)}")
    fact, text = str(name), str(pattern)
    return lambda facts: fnmatchcase(str(facts[fact]), text)


def _value(name: lark.Token, word: lark.Token) -> AxisValue:
    """Return the value to compare with; raises _Mistake if the fact can never have it, as after a typo."""
    value = _literal(name, word)
    if name not in axis_names():
        return value
    try:
        return axis_value(name, value)
    except AxisError as error:
        raise _Mistake(word, str(error)) from None


def _literal(name: lark.Token, word: lark.Token) -> AxisValue:
    """Return the word as a value of the fact's type; numbers and booleans are spelled as in JSON."""
    type_ = _type(name)
    if "*" in word:
        raise _Mistake(word, f"`{word}`: a pattern with `*` can only follow `=`; write a value")
    if type_ is str:
        return str(word)
    try:
        return msgspec.json.decode(str(word), type=type_)
    except msgspec.DecodeError:
        kind = {bool: "true or false", int: "an integer", float: "a number"}[type_]
        raise _Mistake(word, f"`{word}` is no value of `{name}`; write {kind}") from None


def _type(name: lark.Token) -> type[AxisValue]:
    if name not in _TYPES:
        raise _Mistake(name, f"unknown name `{name}`{allowed(name, _TYPES)}")
    return _TYPES[name]


_PARSER = lark.Lark(_GRAMMAR, parser="lalr", lexer="basic", start="either", transformer=_Compiler())
