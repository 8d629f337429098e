"""Prediction of attention in a ring beside the memory of a step that was measured in a simulated world, on rank 0.

Operators of the CPU keep more than the estimate: norms that are not fused keep their input in fp32, in 16 bits their
result as well. What stands in for the kernels of a device copies outputs and gradients into another layout, and so has
a few more tensors at a peak.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from msgspec.structs import replace

from conformance.oracles.memory_model import usage_by_phase
from conformance.plan.cells import Cell
from conformance.plan.mesh import Mesh
from conformance.run.experiment import Job, job_of
from conformance.sizing.activations import kept_for_backward
from conformance.sizing.prediction import Prediction, Request, prediction
from tests.nightly.sizing.test_measured_experts import measured_step, profile

SIZES = {"vocab_size": 128, "dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
LENGTH, SAMPLES = 512, 2


def job_and_prediction(cell: Cell, folder: Path) -> tuple[Job, Prediction]:
    """Return a job that trains the cell with a model of these sizes, and its prediction."""
    job, mesh = job_of(cell, folder, defect=None), Mesh.parse(cell.mesh)
    samples = SAMPLES * mesh.dp_replicate * mesh.dp_shard // mesh.cp
    sizes = SIZES | {"max_seq_len": LENGTH}
    model = replace(job.config.model, **sizes, bias=False)
    data = replace(job.config.data, seq_len=LENGTH, global_batch_size=samples)
    file = folder / "ring.yaml"
    file.write_text(json.dumps(sizes))
    request = Request(
        model=str(file),
        mesh=cell.mesh,
        precision=cell.precision,
        seq_len=LENGTH,
        batch=SAMPLES,
        activation_checkpointing=cell.activation_checkpointing,
    )
    return replace(job, config=replace(job.config, model=model, data=data)), prediction(request)


def output_numel(cell: Cell) -> int:
    """Return the elements of a rank's activation, or of its output of attention."""
    mesh = Mesh.parse(cell.mesh)
    return SAMPLES * LENGTH // mesh.cp * SIZES["dim"] // mesh.tp


def kept_beside_the_estimate(cell: Cell) -> int:
    """Return the bytes that norms keep for backward beside the estimate, without checkpointing."""
    return (4 if cell.precision == "fp32" else 6) * output_numel(cell) * (2 * SIZES["n_layers"] + 1)


@pytest.fixture(scope="module", params=["dp2-cp2", "dp4-cp4", "dp2-tp2-cp2"])
def mesh_options(request: pytest.FixtureRequest) -> Iterator[tuple[str, ProcessPoolExecutor]]:
    """Yield a mesh, and a process for it: DTensor would take groups of another simulated world from its caches."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        yield request.param, process


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
def test_measured_peaks(
    mesh_options: tuple[str, ProcessPoolExecutor], precision: str, checkpointing: str, tmp_path: Path
) -> None:
    """Peaks are not below the prediction, and above it by inputs of norms and up to six outputs of attention."""
    mesh, process = mesh_options
    cell = Cell(mesh=mesh).but(precision=precision, activation_checkpointing=checkpointing)
    job, predicted = job_and_prediction(cell, tmp_path)
    memory = process.submit(measured_step, job).result()
    held_bytes, usages = memory.held_before_bytes, usage_by_phase(memory.segments)
    beside = kept_beside_the_estimate(cell) * (checkpointing == "none") + 6 * 4 * output_numel(cell)
    for phase in ("forward", "backward"):
        predicted_bytes = predicted.phases[phase].peak_bytes
        measured_bytes = held_bytes + usages[phase].peak_bytes
        assert 0.99 * predicted_bytes <= measured_bytes <= 1.01 * predicted_bytes + beside, phase


@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
def test_the_estimate_is_what_operators_keep_but_for_norms(
    mesh_options: tuple[str, ProcessPoolExecutor], precision: str, tmp_path: Path
) -> None:
    """The trainer also copies inputs, labels and its table of rotary angles, of which it keeps the ring's share."""
    mesh, process = mesh_options
    cell = Cell(mesh=mesh).but(precision=precision)
    job, predicted = job_and_prediction(cell, tmp_path)
    kept_bytes = kept_for_backward(process.submit(profile, job).result())
    copies = 2 * LENGTH * SIZES["dim"] // SIZES["n_heads"] // 2 * 4 + 2 * SAMPLES * LENGTH * 8
    estimate = predicted.activation_bytes + kept_beside_the_estimate(cell)
    assert estimate <= kept_bytes + 0.002 * estimate
    assert kept_bytes <= 1.002 * estimate + 2 * copies
