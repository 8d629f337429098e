"""Parameters that do not train, or only from some step on."""

import math
import re

from torch import nn

from reference_trainer.config import Frozen


def trains_in(name: str, frozen: tuple[Frozen, ...], *, step: float) -> bool:
    """Return whether a parameter trains in a step: the first expression that matches its full name decides."""
    matching = (group.until for group in frozen if re.fullmatch(group.names, name))
    until = next(matching, 0)
    return until is not None and until <= step


def freeze(model: nn.Module, frozen: tuple[Frozen, ...], *, step: float = math.inf) -> None:
    """Let only parameters require gradients that train in a step; by default those that train in any.

    Call it after tensor parallelism, whose `SequenceParallel` replaces frozen norms by some that require gradients
    (findings/norms_thawed_by_sequence_parallel.py), and between steps, when FSDP has all parameters sharded.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains_in(name, frozen, step=step))
