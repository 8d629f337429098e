"""Prediction of a model with experts beside the memory of a step that was measured in a simulated world."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from conformance.experiments.memory import step_in_simulation
from conformance.experiments.without_fsdp import profile_without_fsdp
from conformance.oracles.memory_model import usage_by_phase
from conformance.plan.cells import Cell
from conformance.run.experiment import Job, job_of
from conformance.run.ranks.messages import RankContext
from conformance.sizing.activations import kept_for_backward
from conformance.sizing.prediction import Prediction, Request, prediction

SIZES = {
    "vocab_size": 512,
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 512,
    "max_seq_len": 128,
}
EXPERTS = {"number": 8, "active": 2, "ffn_dim": 512, "shared_ffn_dim": 512}
TOKENS = 2 * 128
CONTEXT = RankContext(rank=0, world_size=1, rendezvous="", timeout_s=60.0)


def job_and_prediction(cell: Cell, folder: Path) -> tuple[Job, Prediction]:
    """Return a job that trains the cell with a model of these sizes, and its prediction."""
    job = job_of(cell, folder, defect=None)
    model = replace(job.config.model, **SIZES, bias=False)
    data = replace(job.config.data, seq_len=128, global_batch_size=8)
    file = folder / "experts.yaml"
    file.write_text(json.dumps(SIZES | {"experts": EXPERTS}))
    request = Request(
        model=str(file),
        mesh=cell.mesh,
        precision=cell.precision,
        seq_len=128,
        batch=2,
        activation_checkpointing=cell.activation_checkpointing,
    )
    return replace(job, config=replace(job.config, model=model, data=data)), prediction(request)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
def test_measured_peaks(precision: str, checkpointing: str, tmp_path: Path) -> None:
    """State, gradients and clipping are as predicted; peaks with activations, an estimate, come within 4 %."""
    cell = Cell(mesh="dp4-ep2", model="experts").but(precision=precision, activation_checkpointing=checkpointing)
    job, predicted = job_and_prediction(cell, tmp_path)
    memory = step_in_simulation.perform(CONTEXT, job)
    held_bytes, usages = memory.held_before_bytes, usage_by_phase(memory.segments)
    assert held_bytes == pytest.approx(predicted.state_bytes + predicted.buffer_bytes, rel=1e-5)
    for phase in ("forward", "backward"):
        measured_bytes = held_bytes + usages[phase].peak_bytes
        assert measured_bytes == pytest.approx(predicted.phases[phase].peak_bytes, rel=0.04), phase
    for phase in ("backward", "clip", "optimizer", "idle"):
        measured_bytes = held_bytes + usages[phase].end_bytes
        assert measured_bytes == pytest.approx(predicted.phases[phase].end_bytes, rel=1e-4), phase


@pytest.mark.parametrize(("precision", "bytes_of_norms"), [("fp32", 4), ("bf16-mp", 6)])
def test_the_estimate_is_what_operators_keep_but_for_norms_and_routers(
    precision: str, bytes_of_norms: int, tmp_path: Path
) -> None:
    """Norms that are not fused keep their input in fp32, and in bf16 routers keep theirs as well.

    A block also keeps four orders of the rows, and of each token the probabilities of all experts, and the chosen
    ones with their number, probability and weight.
    """
    cell = Cell(mesh="dp4-ep2", model="experts").but(precision=precision)
    job, predicted = job_and_prediction(cell, tmp_path)
    kept_bytes = kept_for_backward(profile_without_fsdp.perform(CONTEXT, job))
    not_fused = bytes_of_norms * TOKENS * SIZES["dim"] * (2 * SIZES["n_layers"] + 1)
    rows, index = TOKENS * EXPERTS["active"], torch.int64.itemsize
    router = 4 * rows * index + TOKENS * EXPERTS["number"] * 4 + rows * (index + 4 + 4)
    router += TOKENS * SIZES["dim"] * 4 if precision != "fp32" else 0
    assert kept_bytes == pytest.approx(predicted.activation_bytes + not_fused + SIZES["n_layers"] * router, rel=0.002)
