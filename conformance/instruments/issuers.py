"""Issuers: the group of FSDP, or the module in forward, for which Python code calls an operator, by its frames."""

from pathlib import Path
from types import FrameType

import torch
from torch import nn

from conformance.instruments.fsdp_state import group_modules, parameters_of_group
from conformance.project import PACKAGE

_TORCH = str(Path(torch.__file__).parent)
_FSDP = str(Path(_TORCH) / "distributed" / "fsdp")


def issuing_group(frame: FrameType | None) -> str:
    """Return the paths of the modules of the group for which FSDP runs a frame, joined by commas; else nothing.

    >>> issuing_group(None)
    ''
    """
    while frame is not None:
        modules = group_modules(frame.f_locals.get("self"))
        if modules:
            return modules
        frame = frame.f_back
    return ""


def issuing_parameters(frame: FrameType | None) -> frozenset[int]:
    """Return Python's ids of the sharded parameters of the group for which FSDP runs a frame; else nothing."""
    while frame is not None:
        parameters = parameters_of_group(frame.f_locals.get("self"))
        if parameters:
            return parameters
        frame = frame.f_back
    return frozenset()


def is_of_fsdp(frame: FrameType | None) -> bool:
    """Return whether FSDP runs a frame for itself: no code but torch's, and the suite's, lies between.

    A model or a trainer may communicate among the same ranks, as experts do that see the tokens of other ranks.

    >>> is_of_fsdp(None)
    False
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_FSDP):
            return True
        if not file.startswith((_TORCH, str(PACKAGE), "<")):
            return False
        frame = frame.f_back
    return False


def issuing_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module whose forward runs a frame; None outside of forward."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None
