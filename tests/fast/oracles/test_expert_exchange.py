"""Exchanges of rows between ranks with experts, computed by hand."""

from collections import Counter

from msgspec.structs import replace

from conformance.oracles.expert_exchange import exchange_events
from conformance.oracles.tp_schedule import sharded_dim
from conformance.plan.cells import Cell
from reference_trainer.parallel_dims import resolve_mesh


def test_exchanges_between_ranks_with_experts() -> None:
    """Four samples of eight tokens on each rank, two rows of each, in two blocks; numbers once, for eight experts."""
    config = Cell(mesh="dp4-ep2", model="experts").config
    data, model = replace(config.data, global_batch_size=16, seq_len=8), config.model
    dims = resolve_mesh(config.mesh, world_size=4)
    rows, numbers = (4 * 8) * 2 * model.dim, 8
    plain = exchange_events(replace(config, data=data), dims)
    assert Counter((e.phase, e.group, e.dtype, e.numel) for e in plain) == {
        ("forward", "dp_shard/2", "float32", rows): 2 * 2,
        ("forward", "dp_shard/2", "int64", numbers): 2,
        ("backward", "dp_shard/2", "float32", rows): 2 * 2,
    }
    again = exchange_events(replace(config, data=data, activation_checkpointing="full"), dims, mixtures=1)
    assert [(e.dtype, e.numel) for e in again if e.phase == "backward"] == [
        ("int64", numbers),
        *4 * [("float32", rows)],
    ]
    evaluated = replace(config, data=data, accumulation=4, evaluation="between-micro-batches")
    assert Counter((e.phase, e.numel) for e in exchange_events(evaluated, dims, mixtures=1)) == {
        ("forward", rows // 4): 4 * 2,
        ("forward", numbers): 4,
        ("evaluate", rows // 4): 3 * 2,
        ("evaluate", numbers): 3,
        ("backward", rows // 4): 4 * 2,
    }
    assert not exchange_events(config, resolve_mesh(replace(config.mesh, ep=1), world_size=4))


def test_tensor_parallel_ranks_have_hidden_layers_of_experts_and_a_copy_of_the_router() -> None:
    mixture = "layers.0.feed_forward"
    assert [sharded_dim(f"{mixture}.experts.{name}") for name in ("w1", "w2", "w3")] == [1, 2, 1]
    assert sharded_dim(f"{mixture}.router.weight") is None
