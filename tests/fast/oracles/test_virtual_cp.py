"""Rings in one process equal attention of whole sequences, and their collectives are counted."""

from collections import Counter
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from conformance.oracles.emulation import emulated_step
from conformance.oracles.initialisation import initial_weights
from conformance.oracles.reference import initial_model, reference_run
from conformance.oracles.ring_exchange import ring_events
from conformance.oracles.tolerance import fp32_gradients
from conformance.oracles.virtual_cp import ContextParallelForward, positions
from conformance.plan.cells import cell_from_id
from reference_trainer.parallel_dims import resolve_mesh

CONFIG = cell_from_id("dp4-cp4-fp32-default-meta").config


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_have_each_position_once(cp: int) -> None:
    chunks = [positions(16, cp=cp, rank=rank) for rank in range(cp)]
    assert sorted(torch.cat(chunks).tolist()) == list(range(16))
    assert [int(chunk.sum()) for chunk in chunks] == cp * [120 // cp]  # as early as late: equal work under a mask


@pytest.mark.parametrize("cp", [2, 4])
def test_rings_equal_attention_of_whole_sequences(cp: int) -> None:
    model = initial_model(CONFIG)
    tokens = torch.arange(32).view(2, 16) % CONFIG.model.vocab_size
    context = ContextParallelForward(model, cp=cp, seq_len=16)
    parts = [partial(own, tokens[:, places]) for own, places in zip(context.models, context.positions, strict=True)]
    logits = torch.empty(2, 16, CONFIG.model.vocab_size)
    for places, own in zip(context.positions, context.losses(parts), strict=True):
        logits[:, places] = own
    torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["dp4-cp4-fp32-default-meta", "dp2-tp2-cp2-fp32-default-meta"])
def test_gradients_are_those_of_one_process(cell: str) -> None:
    config = cell_from_id(cell).config
    emulated = emulated_step(config, initial_weights(config), step=0)
    expected = reference_run(replace(config, steps=1), dtype=torch.float64)
    assert emulated.loss == pytest.approx(expected.losses[0], rel=1e-6)
    for name, gradient in expected.gradients[0].items():
        error = (emulated.gradients[name].double() - gradient).norm() / gradient.norm()
        assert float(error) <= fp32_gradients(config).value, name


def test_collectives_of_a_ring() -> None:
    config = replace(CONFIG, accumulation=2, evaluation="between-micro-batches", activation_checkpointing="full")
    events = ring_events(config, resolve_mesh(config.mesh, world_size=4))
    counts = Counter((event.phase, event.kind, event.dtype) for event in events)
    layers = config.model.n_layers
    assert counts == {
        ("forward", "all_gather", "float32"): 2 * layers,
        ("evaluate", "all_gather", "float32"): layers,
        ("backward", "all_gather", "float32"): 4 * layers,
        ("backward", "all_to_all", "float32"): 8 * layers,
    }
    tokens = config.data.global_batch_size * config.data.seq_len // 4 // 2
    assert {event.numel for event in events} == {2 * tokens * config.model.dim}


def test_without_shared_samples_there_is_no_ring() -> None:
    config = cell_from_id("dp4-fp32-default-meta").config
    assert ring_events(config, resolve_mesh(config.mesh, world_size=4)) == []
