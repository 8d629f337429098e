"""Faults that the catalogue of known faults does not have, each with the place that a correct explanation names.

A session takes one by `--defect benchmarks/located/FILE.py:NAME`, and its benign twin by `...:NAME.twin`, from the root
of a checkout. Places were written down before any fault was run; `laws` are all that failed on the fault's cell, of
those that judge the cell's run.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from conformance.defects.injection import Defect
from conformance.report.location import Location


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a fault: regular expressions, each of which matches a full field of `Location`."""

    stage: str
    name: str
    """Path of the module, parameter or buffer; empty for the run."""
    quantity: str = ".*"
    collective: str = ".*"

    def is_named_by(self, location: Location) -> bool:
        """Return whether a location names this place."""
        fields = ("stage", "name", "quantity", "collective")
        return all(re.fullmatch(getattr(self, field), getattr(location, field)) for field in fields)


@dataclass(frozen=True, kw_only=True)
class LocatedDefect(Defect):
    """Fault of which the place is known; `cells` selects the one cell in which it is explained."""

    place: Place


def at(stage: str, name: str, quantity: str = ".*", collective: str = ".*") -> Callable[[Defect], LocatedDefect]:
    """Add its place to the Defect below."""
    place = Place(stage=stage, name=name, quantity=quantity, collective=collective)
    return lambda fault: LocatedDefect(**vars(fault), place=place)


def faults(module: ModuleType) -> dict[str, LocatedDefect]:
    """Return the faults of a module by the name that `--defect FILE.py:NAME` takes."""
    return {name: fault for name, fault in vars(module).items() if isinstance(fault, LocatedDefect)}
