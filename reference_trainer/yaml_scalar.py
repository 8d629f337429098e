"""One spelling for every scalar: what two YAML readers could understand differently is refused."""

import math
from typing import Any

import yaml

Scalar = str | int | float | bool | None

# Words that a YAML 1.1 reader takes for something else than the text, and the only spelling accepted here.
_WORDS = {"~": "null", "null": "null"}
_WORDS |= dict.fromkeys(("true", "on", "yes", "y"), "true")
_WORDS |= dict.fromkeys(("false", "off", "no", "n"), "false")
_CONSTANTS: dict[str, Scalar] = {"": None, "null": None, "true": True, "false": False}
_YAML11_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def scalar_value(node: yaml.ScalarNode) -> Scalar:
    """The value of a scalar; ValueError, with what to write instead, if it is unquoted and not spelled canonically."""
    text: str = node.value
    if node.style is not None:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if word := _WORDS.get(text.lower()):
        raise ValueError(f"`{text}` is not the same to every YAML reader: write {word}, or quote it if it is a string")
    readings = _readings(node)
    finite = [number for number in readings if isinstance(number, int) or math.isfinite(number)]
    for number in finite:
        if repr(number) == text:
            return number
    if finite:
        spellings = " or ".join(map(repr, finite))
        raise ValueError(f"`{text}` is not a canonical number: write {spellings}, or quote it if it is a string")
    if readings or node.tag in _YAML11_NUMBERS:
        raise ValueError(f"`{text}` is not a finite number: write a finite one, or quote it if it is a string")
    return text


def _readings(node: yaml.ScalarNode) -> list[int | float]:
    """Every number that Python or YAML 1.1 reads from the text."""

    def yaml11(_: str) -> Any:
        return yaml.SafeLoader("").construct_object(node) if node.tag in _YAML11_NUMBERS else int("")

    found: list[int | float] = []
    for read in (int, lambda text: int(text, 0), float, yaml11):
        try:
            number = read(node.value)
        except (ValueError, OverflowError):
            continue
        if number not in found:
            found.append(number)
    return found
