"""Modules that the rank server loads: none of them may ask CUDA, or no rank could use it."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from conformance.run.pool import PoolError, Pools, Task
from conformance.run.ranks import preload

ASKING = """
import torch
found = torch.cuda.is_available()
"""
POISONED = """
from conformance.run.ranks import process
process.torch.cuda._is_in_bad_fork = lambda: True
"""


def test_a_module_that_asks_for_devices_when_it_is_imported_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module `torch._inductor.runtime.benchmarking` asks in torch 2.11."""
    (tmp_path / "asks_for_devices.py").write_text(ASKING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preload, "_COMPILER_MODULES", ("asks_for_devices",))
    is_available = Mock(return_value=True)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    preload.preload_compiler.__wrapped__()
    assert sys.modules["asks_for_devices"].found is False
    is_available.assert_not_called()
    assert torch.cuda.is_available(), "what torch had is back"


def test_a_rank_that_can_never_use_cuda_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISONED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Pools() as pools, pytest.raises(PoolError, match="has asked CUDA for its devices"):
        pools.run(Task("tests.support.pool_tasks:identity", {}), world_size=1, deadline_s=30)


def test_no_rank_of_this_torch_is_poisoned() -> None:
    """Before and after a task that compiles, whose modules the server imports; tells something on CUDA builds alone."""
    with Pools() as pools:
        for compiles in (False, True, False):
            task = Task("tests.support.pool_tasks:surroundings", {"names": []}, kind=f"{compiles}", compiles=compiles)
            (found,) = pools.run(task, world_size=1, deadline_s=60)
            assert found["has_cuda_context"] is False
            pools.release()
