"""Bounds that carry their derivation: a formula over named terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import sqrt
from types import CodeType


@dataclass(frozen=True)
class Bound:
    """Largest value that rounding, or an allocator, can explain, as a formula over numbers and other bounds.

    The formula is a Python expression over the names of the terms, `sqrt`, `min` and `max`; it is evaluated, so that
    the formula in a report cannot differ from the bound that was applied. Example: `bound("2 * e", e=error)`.
    """

    formula: str
    terms: Mapping[str, "float | Bound"]

    @cached_property
    def value(self) -> float:
        """Value of the formula."""
        numbers = {name: term.value if isinstance(term, Bound) else term for name, term in self.terms.items()}
        names = {"__builtins__": {}, "sqrt": sqrt, "min": min, "max": max, **numbers}
        return float(eval(_compiled(self.formula), names))

    @property
    def derivation(self) -> str:
        """Formula in readable form, followed by the formulas of its terms: `2 e, e = u (3 F + sqrt(tokens))`."""
        readable = [self.formula.replace(" * ", " ")]
        nested = {name: term for name, term in self.terms.items() if isinstance(term, Bound)}
        return ", ".join([*readable, *(f"{name} = {term.derivation}" for name, term in nested.items())])

    @property
    def numbers(self) -> dict[str, float]:
        """Values of all terms by name, those of nested bounds included."""
        values: dict[str, float] = {}
        for name, term in self.terms.items():
            values |= term.numbers if isinstance(term, Bound) else {name: term}
        return values

    def __str__(self) -> str:
        """Value and derivation: `1.95e-05 = u (3 F + sqrt(tokens))`."""
        return f"{self.value:.3g} = {self.derivation}" if self.terms else f"{self.value:.3g}"


def bound(formula: str, **terms: float | Bound) -> Bound:
    """Return the bound of a formula over terms."""
    return Bound(formula, terms)


EXACT = bound("0")
"""Bound where nothing is rounded: no deviation is allowed."""


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<bound>", "eval")
