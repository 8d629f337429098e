"""Building blocks of configurations: a strict struct, and checks with precise errors."""

import math
from collections.abc import Callable, Mapping

import msgspec


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all configurations: closed against unknown keys."""


class UsageError(ValueError):
    """Mistake of a user in an option or a file; the message explains it in one line."""


def require(condition: bool, message: str) -> None:
    """Raise UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def require_each(config: Config, prefix: str, names: str, fits: Callable[[float], bool], requirement: str) -> None:
    """Raise UsageError if one of the fields named in `names`, separated by spaces, does not fit; NaN fits nothing."""
    for name in names.split():
        value = getattr(config, name)
        require(fits(value), f"{prefix}{name} is {value}, must be {requirement}")


def at_least_one(value: float) -> bool:
    """Return whether the value is 1 or more."""
    return value >= 1


def positive(value: float) -> bool:
    """Return whether the value is above 0 and finite."""
    return 0.0 < value < math.inf


def not_negative(value: float) -> bool:
    """Return whether the value is 0 or more, and finite."""
    return 0.0 <= value < math.inf


def require_given(options: Mapping[str, object]) -> None:
    """Raise UsageError for an option whose value is an empty text, as a shell makes of a variable that is not set."""
    for name, value in options.items():
        require(value != "", f"{name} is empty: give a value, or leave the option out")


def fraction(value: float) -> bool:
    """Return whether the value is at least 0 and below 1."""
    return 0.0 <= value < 1.0
