"""Races of an FSDP2 training in two ranks under torchrun, and of a test under pytest."""

import os
from pathlib import Path

import pytest

from conformance.project import PROJECT
from conformance.sim_runs.races.exploring import explore
from conformance.sim_runs.races.findings import Exploration
from conformance.sim_runs.races.text import text
from conformance.sim_runs.running import command_of
from tests.support.programs import output_of

LIMIT_S = 300.0
TRAINING = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

if "planted" in sys.argv:
    copy_out = group.foreach_all_gather_copy_out
    group.foreach_all_gather_copy_out = lambda result, *rest: copy_out(result._replace(all_gather_event=None), *rest)
dist.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4))).to("sim")
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    loss = model(torch.randn(8, 64).to("sim")).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
dist.destroy_process_group()
"""
TESTS = """
import torch


def test_sum():
    x = torch.zeros(100, device="sim")
    side = torch.Stream(device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    assert (x * 2).sum().item() == 200
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.usefixtures("compiled_device")


def exploration_of_training(directory: Path, *arguments: str, schedules: int) -> Exploration:
    script = directory / "training.py"
    script.write_text(TRAINING)
    command = command_of([str(script), *arguments], world_size=2, translate=False)
    return explore(command, schedules, environment=ENVIRONMENT, limit_s=LIMIT_S)


def test_a_right_training_is_free_of_races_under_twenty_schedules(tmp_path: Path) -> None:
    exploration = exploration_of_training(tmp_path, schedules=20)
    assert exploration.is_clean, text(exploration)
    assert exploration.processes == ["rank 0", "rank 1"]
    assert exploration.coverage.runs == 20
    assert exploration.coverage.orders > 10


def test_a_missing_wait_for_the_all_gather_is_named(tmp_path: Path) -> None:
    exploration = exploration_of_training(tmp_path, "planted", schedules=2)
    assert [bool(run.differences) for run in exploration.runs] == [False, True]
    assert exploration.smallest is not None
    (delayed,) = exploration.smallest.delayed
    assert (delayed.operator, delayed.stream) == ("all_gather", "all_gather_stream")
    pair = exploration.pairs[exploration.explained_by[0]]
    assert (pair.first.stream, pair.second.stream) == ("all_gather_stream", "default stream")
    assert pair.second.operator.startswith("aten::split_with_sizes_copy")
    assert [*pair.members] == ["rank 0", "rank 1"]


def test_a_test_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = ("-m", "pytest", "-p", "no:cacheprovider", "--sim", "--schedules", "3", "test_it.py")
    shown = output_of(*command, status=1, cwd=tmp_path, variables={"OMP_NUM_THREADS": "1"})
    assert "test_it.py:10 (test_sum)" in shown
    assert "delaying one operator suffices" in shown
