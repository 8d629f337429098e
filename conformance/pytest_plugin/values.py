"""Values of the options of the suite, as a user may give them.

Not in `options`: pytest loads that before it rewrites assertions of the packages that are imported here.
"""

from collections.abc import Callable
from typing import Any

from conformance.pytest_plugin.options import SESSION_OPTIONS
from reference_trainer.checks import UsageError, require, require_given

_LARGEST_SEED = 2**62
"""Cells have small seeds, to which that of a session is added: the sum must fit into 63 bits."""


def require_values(option: Any) -> None:
    """Raise UsageError for an option of the suite whose value is an empty text."""
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(option).items()}
    require_given({name: value for name, value in given.items() if name in SESSION_OPTIONS})


def parse_seed(text: str) -> int:
    """Return the number of `--seed`. Raises UsageError for any other text, and for numbers that no generator takes."""
    allowed = f"--seed {text}: write a whole number from 0 to {_LARGEST_SEED}"
    try:
        number = int(text)
    except ValueError:
        raise UsageError(allowed) from None
    require(0 <= number <= _LARGEST_SEED, allowed)
    return number


def parse_seconds(name: str, text: str, fits: Callable[[float], bool], requirement: str) -> float:
    """Return the time of an option in seconds. Raises UsageError for any other text, and for times that do not fit."""
    allowed = f"{name} {text}: write a number of seconds, {requirement}"
    try:
        value = float(text)
    except ValueError:
        raise UsageError(allowed) from None
    require(fits(value), allowed)
    return value
