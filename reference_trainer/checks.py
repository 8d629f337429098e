"""What configurations are made of: a strict struct, and checks that say what is wrong."""

import math
from collections.abc import Callable

import msgspec


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all configurations: closed against unknown keys."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_each(config: Config, prefix: str, names: str, fits: Callable[[float], bool], requirement: str) -> None:
    """Raises ValueError if one of the named fields does not fit; NaN fits nothing."""
    for name in names.split():
        value = getattr(config, name)
        require(fits(value), f"{prefix}{name} is {value}, must be {requirement}")


def at_least_one(value: float) -> bool:
    return value >= 1


def positive(value: float) -> bool:
    return 0.0 < value < math.inf


def not_negative(value: float) -> bool:
    return 0.0 <= value < math.inf


def fraction(value: float) -> bool:
    return 0.0 <= value < 1.0
