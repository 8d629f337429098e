"""Parameters that train in a step, from the configuration: the others have no gradient, and are left alone.

They are frozen, or belong to blocks that no forward pass of the step computes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from conformance.oracles import skipped
from reference_trainer.config import TrainerConfig

T = TypeVar("T")


def is_trained(parameter: str, config: TrainerConfig, *, step: float = math.inf) -> bool:
    """Return whether a parameter trains in a step; by default whether it does in any, however late.

    The first entry of the table whose expression matches the full name decides.
    """
    until = next((entry.until for entry in config.frozen if re.fullmatch(entry.names, parameter)), 0)
    return until is not None and step >= until and skipped.is_used(parameter, config, step=step)


def trained(by_parameter: Mapping[str, T], config: TrainerConfig, *, step: float = math.inf) -> dict[str, T]:
    """Return the entries of the parameters that train in a step; by default in any."""
    return {name: value for name, value in by_parameter.items() if is_trained(name, config, step=step)}


def at_step(config: TrainerConfig, step: int) -> TrainerConfig:
    """Return the configuration of a run whose steps are all like this one.

    Parameters that are frozen at that time are frozen for ever, and each step leaves out the same blocks.
    """
    entries = [
        replace(entry, until=None if entry.until is None or step < entry.until else 0) for entry in config.frozen
    ]
    return replace(config, frozen=tuple(entries), skipped=skipped.passes_of_step(config, step))


def first_of_each(by_step: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the first entry of each parameter, of the gradients of all steps."""
    first: dict[str, T] = {}
    for entries in by_step:
        first = {**entries, **first}
    return first
