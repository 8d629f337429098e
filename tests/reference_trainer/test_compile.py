"""Compiled blocks: one graph for all of them, and the backend that a cell is compiled with."""

import shutil
from typing import Literal

import pytest
import torch

from conformance.experiments import context
from conformance.experiments.simulation import simulated_world
from conformance.plan.cells import Cell
from conformance.plan.mesh import Mesh
from conformance.plan.workload import compile_backend
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import TrainerConfig
from reference_trainer.train import Trainer


@pytest.mark.parametrize("mesh", ["dp2", "dp2-tp2"])
def test_one_graph_serves_all_blocks(mesh: str) -> None:
    """Torch raises an error where it would compile the second block by itself."""
    cell = Cell(mesh=mesh, compile=True)
    config = cell.config
    try:
        with simulated_world(cell.world_size), torch._dynamo.config.patch(error_on_recompile=True):
            Trainer(config, device=torch.device("cpu"), world_size=cell.world_size).train_step(0)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(
    ("mesh", "has_compiler", "backend"),
    [("dp1", True, "inductor"), ("dp1", False, "aot_eager"), ("dp2", True, "aot_eager"), ("tp2", True, "aot_eager")],
)
def test_inductor_compiles_on_one_rank(
    mesh: str, has_compiler: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if has_compiler else None)
    assert compile_backend(Mesh.parse(mesh)) == backend


@pytest.mark.parametrize(
    ("device", "given", "used"),
    [("", "aot_eager", "aot_eager"), ("GPU-1", "aot_eager", "inductor"), ("GPU-1", "none", "none")],
)
def test_inductor_compiles_on_devices(device: str, given: Literal["none", "aot_eager"], used: str) -> None:
    rank = RankContext(rank=0, world_size=8, rendezvous="", timeout_s=1.0, device=device)
    config = TrainerConfig(compile=given)
    assert context._compiled_for_device(rank, config).compile == used
