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
from conformance.defects.places import Place
from conformance.report.location import Location


@dataclass(frozen=True, kw_only=True)
class LocatedDefect(Defect):
    """Fault of which the place is known; `cells` selects the one cell in which it is explained."""

    place: Place


def at(stage: str, name: str, quantity: str = "", collective: str = "") -> Callable[[Defect], LocatedDefect]:
    """Add its place to the Defect below; several stages are separated by `|`."""
    place = Place(stages=tuple(stage.split("|")), name=name, quantity=quantity, collective=collective)
    return lambda fault: LocatedDefect(**vars(fault), place=place)


def faults(module: ModuleType) -> dict[str, LocatedDefect]:
    """Return the faults of a module by the name that `--defect FILE.py:NAME` takes."""
    return {name: fault for name, fault in vars(module).items() if isinstance(fault, LocatedDefect)}


def is_named(place: Place, location: Location | None, reason: str = "") -> bool:
    """Return whether a location, or the reason of the law, names a place."""
    if place.where:
        told = location.sentence if location else ""
        texts = [told] if place.where in ("memory", "schedule") and told else [told, reason]
        return any(re.search(place.text, text) for text in texts)
    return (
        location is not None
        and location.stage in place.stages
        and re.fullmatch(place.name or "", location.name) is not None
        and re.search(place.quantity, location.quantity) is not None
        and re.search(place.collective, f"{location.collective} {location.quantity}") is not None
        and (not place.ranks or list(place.ranks) == location.ranks)
    )
