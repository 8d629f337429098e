"""Issuers: the group of FSDP, or the module in forward, for which Python code calls an operator, by its frames."""

from types import FrameType

from torch import nn

from conformance.instruments.fsdp_state import group_modules


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


def issuing_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module whose forward runs a frame; None outside of forward."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None
