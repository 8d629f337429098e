"""Tasks of ranks on a CUDA build of torch."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

from conformance.experiments.training import train_cell
from conformance.run.ranks.messages import RankContext

_CALLS = ("_cuda_getDeviceCount", "_cuda_init", "_cuda_setDevice", "_cuda_getDevice")
"""Functions of `torch._C` that ask the driver."""


def train_and_count(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Train a cell; returns how often torch has asked CUDA for anything, by function of `torch._C`."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(torch._C, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        return call

    patches = [patch.object(torch._C, name, counted(name)) for name in _CALLS if hasattr(torch._C, name)]
    for each in patches:
        each.start()
    try:
        result = train_cell(context, payload)
    finally:
        for each in patches:
            each.stop()
    return {"calls": dict(calls), "finished": "facts" in result, "devices": torch.cuda.device_count()}


def allocator_settings(_context: RankContext, _payload: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of CUDA's allocator as this process has read them, which needs no device."""
    settings: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
