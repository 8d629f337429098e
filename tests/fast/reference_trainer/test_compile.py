"""Compiled blocks: one graph for all of them, and the backend that a cell is compiled with."""

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch

from conformance.experiments.context import simulated_world
from conformance.plan.cells import Cell, compile_backend, compiled_on_device
from conformance.plan.mesh import Mesh
from conformance.run.record import Header, Record, RecordFile
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
    ("substrate", "given", "used"),
    [("gloo", "aot_eager", "aot_eager"), ("nccl", "aot_eager", "inductor"), ("nccl", "none", "none")],
)
def test_inductor_compiles_on_devices(
    substrate: Literal["gloo", "nccl"], given: str, used: str, tmp_path: Path
) -> None:
    """Laws are told of the backend that the ranks used."""
    cell = Cell(mesh="dp2", compile=given != "none")
    header = Header(cell=cell, session="", torch="2.13.0", substrate=substrate, defect=None)
    assert cell.config.compile == given
    assert Record(tmp_path, RecordFile(header=header)).config.compile == used
    on_device = compiled_on_device(cell.config).compile
    assert on_device == ("none" if given == "none" else "inductor")
