"""FSDP1 beside FSDP2: its memory model on a case small enough to follow by hand, and the laws on figures made up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.experiments.simulation import simulated_world
from conformance.judge.law import law_of
from conformance.judge.skips import Unsupported
from conformance.judge.support import unsupported
from conformance.laws import test_fsdp1 as laws
from conformance.laws import test_streams as streams
from conformance.oracles.fsdp1_memory import predict_fsdp1
from conformance.oracles.memory_model import Segment, predict
from conformance.oracles.tp_schedule import local_shapes
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from conformance.run.devices.hardware import Hardware
from conformance.run.devices.nvml import Device
from reference_trainer.checkpoint import Checkpoints
from reference_trainer.fsdp1 import summon_full_params
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.train import Trainer

GROUPS = ("tok_embeddings", "layers.0", "layers.1", "output")
CELL = Cell(mesh="dp4", init="full", implementation="fsdp1")
GIB = 1024**3


def segments() -> list[Segment]:
    """A model without activations and gradients."""
    marks = ["forward", *(f"{when} {group}" for group in GROUPS for when in ("forward", "after-forward")), "backward"]
    marks += [f"{when} {group}" for group in reversed(GROUPS) for when in ("backward", "after-backward", "freed")]
    return [Segment(mark, 0, 0, 0) for mark in (*marks, "end")]


def sizes(cell: Cell) -> dict[str, int]:
    """Bytes of each group in fp32, padded to a multiple of the ranks."""
    model = trainer_config(cell).model
    head, kv = model.dim * model.dim, model.dim * model.n_kv_heads * model.head_dim
    weights = 2 * head + 2 * kv + 3 * model.dim * model.ffn_dim
    biases = 2 * model.dim + 2 * model.n_kv_heads * model.head_dim + 2 * model.ffn_dim + model.dim
    block, table = weights + biases + 2 * model.dim, model.vocab_size * model.dim
    numels = {"tok_embeddings": table, "block": block, "output": model.dim + table}
    return {group: -(-numel // cell.world_size) * cell.world_size * 4 for group, numel in numels.items()}


def predicted(cell: Cell) -> dict[str, Any]:
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    predicts = predict_fsdp1 if cell.implementation == "fsdp1" else predict
    return predicts(config, dims, local_shapes(config.model, tp=1, tp_rank=0), segments())


def test_a_step_without_activations() -> None:
    """The root all the time; in forward one block, or all; in backward two, and the vector of a block's gradients."""
    of = sizes(CELL)
    default, never = predicted(CELL), predicted(CELL.but(reshard="never"))
    assert default["forward"].peak_bytes == of["output"] + of["block"]
    assert default["forward"].end_bytes == of["output"]
    assert default["backward"].peak_bytes == of["output"] + 3 * of["block"]
    assert default["backward"].end_bytes == (of["tok_embeddings"] + 2 * of["block"] + of["output"]) // 4
    everything = of["tok_embeddings"] + 2 * of["block"] + of["output"]
    assert never["forward"].peak_bytes == never["forward"].end_bytes == everything


def test_gradients_are_reduced_in_another_dtype_beside_themselves() -> None:
    of = sizes(CELL)
    mixed = predicted(CELL.but(precision="bf16-mp"))
    # In forward a block beside the root, and its shard in the dtype of computation.
    assert mixed["forward"].peak_bytes == (of["output"] + of["block"] + of["block"] // 4) // 2
    # Root and first block in bf16, the vector of the second block's gradients, the same in fp32 and a shard of it.
    held = (of["output"] + 2 * of["block"]) // 2 + of["block"] + of["block"] // 4
    assert mixed["backward"].peak_bytes == held


def measured(*, fsdp1: int = 0, fsdp2: int = 0) -> Any:
    """The fixture `measure`, with what the models predict for no activations, and so many bytes more."""

    def measure(task: str, cell: Cell, *, alone: bool = False, on_device: bool = False) -> list[Any]:
        assert alone
        if task.endswith("without_fsdp"):
            return [[{"mark": s.mark, "start_bytes": 0, "peak_bytes": 0, "end_bytes": 0} for s in segments()]]
        more = fsdp1 if cell.implementation == "fsdp1" else fsdp2
        found = [{"mark": phase, "peak_bytes": usage.peak_bytes + more} for phase, usage in predicted(cell).items()]
        return [{"segments": found}]

    return measure


@pytest.mark.parametrize("axes", [{}, {"reshard": "never"}, {"precision": "bf16-mp"}, {"limit_all_gathers": False}])
def test_what_the_models_say_passes(axes: dict[str, Any]) -> None:
    laws.test_fsdp2_holds_no_more_than_fsdp1_and_its_own_buffers(measured(), CELL.but(**axes))


def test_more_than_fsdp1_and_the_own_buffers_fails() -> None:
    with pytest.raises(ConformanceFailure, match=r"FSDP2's peak of forward of rank 0 .*: measured"):
        laws.test_fsdp2_holds_no_more_than_fsdp1_and_its_own_buffers(measured(fsdp2=1024), CELL)


@pytest.mark.parametrize("off", [-1024, 1024])
def test_a_peak_of_fsdp1_that_is_not_understood_fails(off: int) -> None:
    with pytest.raises(ConformanceFailure, match="FSDP1's peak of forward of rank 0, by its model: measured"):
        laws.test_fsdp2_holds_no_more_than_fsdp1_and_its_own_buffers(measured(fsdp1=off), CELL)


def on_device(fsdp1: int, fsdp2: int, *, held: int = 0) -> Any:
    """The fixture `measure` on two ranks with these peaks in use, of which the second rank holds more for streams."""

    def measure(task: str, cell: Cell) -> list[dict[str, int]]:
        assert task == "device_memory:step_on_device"
        peak = fsdp1 if cell.implementation == "fsdp1" else fsdp2
        return [{"allocated": peak, "active": peak + more, "reserved": 2 * peak} for more in (0, held)]

    return measure


def test_a_device_is_judged_by_what_is_active() -> None:
    laws.test_fsdp2_needs_no_more_of_a_device_than_fsdp1(on_device(2 * GIB, GIB), CELL)
    with pytest.raises(ConformanceFailure, match="active peak of FSDP2, rank 0: measured"):
        laws.test_fsdp2_needs_no_more_of_a_device_than_fsdp1(on_device(GIB, 2 * GIB), CELL)


@pytest.mark.parametrize("value", ["unset", "0", "1"])
def test_what_is_held_for_a_stream_fails(value: str) -> None:
    cell = Cell(record_streams=value)  # type: ignore[arg-type]
    streams.test_nothing_is_held_for_a_stream(on_device(0, GIB), cell)
    with pytest.raises(ConformanceFailure, match=r"held for streams: measured 512, expected 0 bytes; rank 1"):
        streams.test_nothing_is_held_for_a_stream(on_device(0, GIB, held=512), cell)


def test_before_2_8_only_the_variable_promises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    streams.test_nothing_is_held_for_a_stream(on_device(0, GIB), Cell(record_streams="1"))
    with pytest.raises(Unsupported, match=r"unless TORCH_NCCL_AVOID_RECORD_STREAMS is 1; this is 2.7.1"):
        streams.test_nothing_is_held_for_a_stream(on_device(0, GIB), Cell())


@pytest.mark.parametrize(
    "test", [laws.test_fsdp2_needs_no_more_of_a_device_than_fsdp1, streams.test_nothing_is_held_for_a_stream]
)
def test_what_is_missing_is_said_with_numbers(test: Any) -> None:
    law = law_of(test)
    assert law is not None
    three = Hardware(devices=tuple(Device(f"GPU-{number}", "fake", 0) for number in range(3)))
    reason = "needs 8 CUDA devices for substrate nccl, 1 for nccl-shared, found 3, with one rank on each"
    cell = CELL.but(mesh="dp2-tp4")
    assert unsupported(law, cell, torch_version="2.13.0+cpu", max_world_size=8, hardware=three) == reason


def test_a_run_of_fsdp1_has_no_checkpoints(tmp_path: Path) -> None:
    with simulated_world(2):
        trainer = Trainer(trainer_config(CELL.but(mesh="dp2")), device=torch.device("cpu"), world_size=2)
        with pytest.raises(ValueError, match="implementation fsdp1 is for comparison alone, and has no checkpoints"):
            Checkpoints(tmp_path / "checkpoints").save(trainer, steps_done=0)


def test_parameters_have_their_names_always_and_their_shapes_where_they_are_whole() -> None:
    with simulated_world(2):
        trainer = Trainer(trainer_config(CELL.but(mesh="dp2")), device=torch.device("cpu"), world_size=2)
        flat = dict(trainer.model.named_parameters())
        with summon_full_params(trainer.model):
            shapes = {name: tuple(p.shape) for name, p in trainer.model.named_parameters()}
        assert flat.keys() == shapes.keys() == dict(whole_model().named_parameters()).keys()
        assert shapes == {name: tuple(p.shape) for name, p in whole_model().named_parameters()}
        assert {p.ndim for p in flat.values()} == {1}


def whole_model() -> torch.nn.Module:
    from reference_trainer.model import Transformer

    with torch.device("meta"):
        return Transformer(trainer_config(CELL).model)
