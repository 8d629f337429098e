"""CUDA build of torch on a machine without a device: ranks start, and fall back to the CPU.

The job `cuda-build` of ci/pipeline.sh runs these tests, those of forks in tests/ranks/run/ranks and the profile smoke.
"""

from pathlib import Path

import msgspec
import pytest
import torch

from conformance.plan.cells import ALLOCATOR_VARIABLES, Cell
from conformance.run.experiment import job_of
from conformance.run.pool import Pools, Task

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is no CUDA build")
TASKS = "tests.support.cuda_tasks"


@pytest.mark.parametrize("mesh", ["dp2", "dp2-tp2"])
def test_ranks_on_processors_ask_cuda_for_nothing(pools: Pools, tmp_path: Path, mesh: str) -> None:
    """Else each would load the driver and open its devices, and be another run than on a machine without any."""
    cell = Cell(mesh=mesh)
    payload = msgspec.to_builtins(job_of(cell, tmp_path, defect=None))
    task = Task(f"{TASKS}:train_and_count", payload, kind=mesh)
    for result in pools.run(task, world_size=cell.world_size, deadline_s=120):
        assert result == {"calls": {}, "finished": True, "devices": 0}


@pytest.mark.parametrize("value", ["True", "False"])
def test_ranks_read_the_allocators_settings_of_their_task(pools: Pools, value: str) -> None:
    """After the fork: variables of the server's process must not have been read before."""
    env = dict.fromkeys(ALLOCATOR_VARIABLES, f"expandable_segments:{value}")
    task = Task(f"{TASKS}:allocator_settings", {})
    (settings,) = pools.run(task, world_size=1, deadline_s=60, env=env)
    assert settings["expandable_segments"] is (value == "True")
