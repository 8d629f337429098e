"""CUDA build of torch on a machine without a device: ranks start, and fall back to the CPU.

The job `cuda-build` of ci/pipeline.sh runs these tests, those of forks in tests/ranks/run/ranks and the profile smoke.
"""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from conformance.experiments.training import train_cell
from conformance.plan.cells import ALLOCATOR_VARIABLES, Cell
from conformance.run.experiment import job_of, json_like
from conformance.run.pool import Pools, Task
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


pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is no CUDA build")


@pytest.mark.parametrize("mesh", ["dp2", "dp2-tp2"])
def test_ranks_on_processors_ask_cuda_for_nothing(pools: Pools, tmp_path: Path, mesh: str) -> None:
    """Else each would load the driver and open its devices, and be another run than on a machine without any."""
    cell = Cell(mesh=mesh)
    payload = json_like(job_of(cell, tmp_path, defect=None))
    task = Task(f"{__name__}:train_and_count", payload, kind=mesh)
    for result in pools.run(task, world_size=cell.world_size, deadline_s=120):
        assert result == {"calls": {}, "finished": True, "devices": 0}


@pytest.mark.parametrize("value", ["True", "False"])
def test_ranks_read_the_allocators_settings_of_their_task(pools: Pools, value: str) -> None:
    """After the fork: variables of the server's process must not have been read before."""
    env = dict.fromkeys(ALLOCATOR_VARIABLES, f"expandable_segments:{value}")
    task = Task(f"{__name__}:allocator_settings", {})
    (settings,) = pools.run(task, world_size=1, deadline_s=60, env=env)
    assert settings["expandable_segments"] is (value == "True")
