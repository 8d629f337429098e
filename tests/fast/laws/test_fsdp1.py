"""FSDP1 compared with FSDP2: its memory model on a small case, and laws on devices with made-up peaks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.experiments.context import simulated_world
from conformance.experiments.memory import DevicePeaks, step_on_device, step_with_older_process_group
from conformance.judge.law import law_of
from conformance.judge.support import Machine, unsupported
from conformance.laws.memory import test_fsdp1 as laws
from conformance.laws.schedule import test_stream as streams
from conformance.memory_segment import MemorySegment
from conformance.oracles.fsdp1_memory import predict_fsdp1
from conformance.oracles.memory_model import predict
from conformance.oracles.tp_schedule import local_shapes
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.run.devices.hardware import Hardware
from conformance.run.devices.nvml import Device
from reference_trainer.checkpoint import Checkpoints
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.train import Trainer

GROUPS = ("tok_embeddings", "layers.0", "layers.1", "output")
CELL = Cell(mesh="dp4", init="full", implementation="fsdp1")
GIB = 1024**3


def segments() -> list[MemorySegment]:
    """Return the profile of a model without activations and gradients."""
    marks = ["forward", *(f"{when} {group}" for group in GROUPS for when in ("forward", "after-forward")), "backward"]
    marks += [f"{when} {group}" for group in reversed(GROUPS) for when in ("backward", "after-backward", "freed")]
    return [MemorySegment(mark, 0, 0, 0) for mark in (*marks, "end")]


def sizes(cell: Cell) -> dict[str, int]:
    """Return the bytes of each group in fp32, padded to a multiple of the ranks."""
    model = cell.config.model
    head, kv = model.dim * model.dim, model.dim * model.n_kv_heads * model.head_dim
    weights = 2 * head + 2 * kv + 3 * model.dim * model.ffn_dim
    biases = 2 * model.dim + 2 * model.n_kv_heads * model.head_dim + 2 * model.ffn_dim + model.dim
    block, table = weights + biases + 2 * model.dim, model.vocab_size * model.dim
    numels = {"tok_embeddings": table, "block": block, "output": model.dim + table}
    return {group: -(-numel // cell.world_size) * cell.world_size * 4 for group, numel in numels.items()}


def predicted(cell: Cell) -> dict[str, Any]:
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    predicts = predict_fsdp1 if cell.implementation == "fsdp1" else predict
    return predicts(config, dims, local_shapes(config.model, tp=1, tp_rank=0), segments())


def test_a_step_without_activations() -> None:
    """The root is held throughout, in forward one block or all, in backward two, and a block's flat gradient."""
    table, block, output = sizes(CELL).values()
    default, never = predicted(CELL), predicted(CELL.but(reshard="never"))
    assert default["forward"].peak_bytes == output + block
    assert default["forward"].end_bytes == output
    assert default["backward"].peak_bytes == output + 3 * block
    assert default["backward"].end_bytes == (table + 2 * block + output) // 4
    everything = table + 2 * block + output
    assert never["forward"].peak_bytes == never["forward"].end_bytes == everything


def test_gradients_are_held_in_both_dtypes_while_they_are_reduced() -> None:
    _, block, output = sizes(CELL).values()
    mixed = predicted(CELL.but(precision="bf16-mp"))
    # In forward: a block and the root, and a block's shard in the dtype of computation.
    assert mixed["forward"].peak_bytes == (output + block + block // 4) // 2
    # In backward: root and first block in bf16, the second block's flat gradient in bf16 and fp32, and its shard.
    held = (output + 2 * block) // 2 + block + block // 4
    assert mixed["backward"].peak_bytes == held


def on_device(fsdp1: int, fsdp2: int) -> Any:
    """Return the fixture `measure` on two ranks with these peaks."""

    def measure(experiment: Any, cell: Cell) -> list[dict[str, DevicePeaks]]:
        if experiment is step_with_older_process_group:
            return [{}, {}]  # measured on the simulated device alone
        assert experiment is step_on_device
        peak = fsdp1 if cell.implementation == "fsdp1" else fsdp2
        return [{"behind": DevicePeaks(allocated=peak, active=peak, reserved=2 * peak)}] * 2

    return measure


def test_a_device_is_judged_by_active_memory() -> None:
    laws.test_fsdp2_active_peak_is_at_most_fsdp1s(on_device(2 * GIB, GIB), CELL)
    with pytest.raises(ConformanceFailure, match="active peak of FSDP2, rank 0: measured"):
        laws.test_fsdp2_active_peak_is_at_most_fsdp1s(on_device(GIB, 2 * GIB), CELL)


def test_before_2_8_only_the_variable_promises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    streams.test_record_stream_holds_no_memory(on_device(0, GIB), Cell(record_streams="1"))
    with pytest.raises(Unsupported, match=r"unless TORCH_NCCL_AVOID_RECORD_STREAMS is 1; this is 2.7.1"):
        streams.test_record_stream_holds_no_memory(on_device(0, GIB), Cell())


@pytest.mark.parametrize(
    "test", [laws.test_fsdp2_active_peak_is_at_most_fsdp1s, streams.test_record_stream_holds_no_memory]
)
def test_unsupported_names_the_missing_devices(test: Any) -> None:
    law = law_of(test)
    assert law is not None
    three = Hardware(devices=tuple(Device(f"GPU-{number}", "fake", 0) for number in range(3)))
    machine = Machine(hardware=three, torch_version="2.13.0+cpu", max_world_size=8)
    assert unsupported(law, CELL.but(mesh="dp2-tp4"), machine) == "needs 8 GPUs (nccl); 3 found"


def test_a_run_of_fsdp1_has_no_checkpoints(tmp_path: Path) -> None:
    with simulated_world(2):
        trainer = Trainer(CELL.but(mesh="dp2").config, device=torch.device("cpu"), world_size=2)
        with pytest.raises(ValueError, match="implementation fsdp1 is for comparison alone, and has no checkpoints"):
            Checkpoints(tmp_path / "checkpoints").save(trainer, steps_done=0)
