"""Smallest failing cell of a cause, in the report and in words."""

from collections.abc import Mapping

import msgspec


class Smallest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest cell on which a law fails as it does in a case of the session."""

    case: str
    """Id of the failed case from whose cell the search began."""
    law: str
    cell: str
    """Id of the smallest cell, which the profile may not have."""
    features: dict[str, str]
    """Values of axes, other than their defaults, without any one of which the law does not fail alike."""
    bound: dict[str, str]
    """Further such values, without which no case of the law can have these features."""
    passes: bool
    """True if the law passes without any one of the features; False if it fails in another way without some."""
    complete: bool
    """False if the search ended before all features were known to be needed."""
    judged: int
    """Number of cases that were judged for the search, besides those of the session."""
    seconds: float
    """Duration of the search."""
    repro: str
    """Command that repeats the law on the smallest cell."""


def smallest_text(smallest: Smallest) -> str:
    """Return one line: the cell, what the law fails with, and that it passes without."""
    clauses = [f"smallest failing cell: {smallest.cell}: {_fails_with(smallest)}"]
    if smallest.bound:
        clauses.append(f"no case of {smallest.law} can do without {_joined(smallest.bound)}")
    if not smallest.complete:
        clauses.append("the search ended early, not all of it may be needed")
    return "; ".join(clauses)


def _fails_with(smallest: Smallest) -> str:
    if not smallest.features:
        return "fails without any other feature" if smallest.bound else "fails without any feature"
    text = f"fails with {_joined(smallest.features)}"
    if not smallest.complete:
        return text
    without = {1: "it", 2: "either"}.get(len(smallest.features), "any one of these")
    return f"{text}; {'passes' if smallest.passes else 'does not fail alike'} without {without}"


def _joined(values: Mapping[str, str]) -> str:
    *others, last = [f"{axis} = {value}" for axis, value in values.items()]
    return f"{', '.join(others)} and {last}" if others else last
