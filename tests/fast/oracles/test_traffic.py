"""Traffic model on an example computed manually."""

from typing import Any

import msgspec
import pytest

from conformance.oracles.clip_schedule import clip_events
from conformance.oracles.tp_schedule import local_shapes, sharded_dim, tensor_parallel_events
from conformance.oracles.traffic import Traffic, add_up, ranks_in, sent_bytes, step_events
from reference_trainer.config import DataConfig, MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

# 2 samples of 4 tokens a rank: activations of 8 x 4 = 32 elements.
CONFIG = TrainerConfig(
    model=ModelConfig(vocab_size=3, dim=4, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=6, max_seq_len=4),
    mesh=MeshConfig(dp_shard=2, tp=2),
    data=DataConfig(seq_len=4, global_batch_size=4),
)
LETTERS = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}


def tensor_parallel(config: TrainerConfig) -> str:
    """Return the events as text, such as `forward: S32 G16`: a reduce-scatter of 32 elements, an all-gather of 16."""
    words, phase = [], ""
    for event in tensor_parallel_events(config, resolve_mesh(config.mesh, world_size=4)):
        assert event.group == "tp"
        if event.phase != phase:
            phase = event.phase
            words.append(f"{phase}:")
        words.append(f"{LETTERS[event.kind]}{event.numel}")
    return " ".join(words)


def but(**changes: Any) -> TrainerConfig:
    return msgspec.structs.replace(CONFIG, **changes)


# Forward: embedding, attention, feed-forward, output, and logits padded to 2 of 3 tokens a rank.
FORWARD = "forward: S32 G16 S32 G16 S32 G16 G16"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Backward: output and its norm's weight, feed-forward, attention and their norms' weights, embedding.
        (CONFIG, f"{FORWARD} backward: S32 R4 G16 S32 G16 S32 R4 R4 G16"),
        (but(sequence_parallel=False), "forward: R32 R32 R32 G16 backward: R32 R32 R32"),
        (
            but(loss_parallel=True),
            "forward: S32 G16 S32 G16 S32 G16 R8 R8 R8 backward: S32 R4 G16 S32 G16 S32 R4 R4 G16",
        ),
        (but(activation_checkpointing="full"), f"{FORWARD} backward: S32 R4 G16 G16 S32 G16 S32 G16 S32 R4 R4 G16"),
        (
            but(activation_checkpointing="full", compile="inductor"),
            f"{FORWARD} backward: S32 R4 G16 S32 G16 S32 G16 S32 G16 S32 R4 R4 G16",
        ),
        (
            but(sequence_parallel=False, activation_checkpointing="selective"),
            "forward: R32 R32 R32 G16 backward: R32 R32 R32 R32",
        ),
        (
            but(activation_checkpointing="selective", model=msgspec.structs.replace(CONFIG.model, dropout=0.1)),
            f"{FORWARD} backward: S32 R4 G16 S32 G16 S32 G16 S32 G16 S32 R4 R4 G16",
        ),
        (
            but(accumulation=2, gradient_sync="last"),
            "forward: S16 G8 S16 G8 S16 G8 G8 backward: S16 G8 S16 G8 S16 G8 "
            "forward: S16 G8 S16 G8 S16 G8 G8 backward: S16 R4 G8 S16 G8 S16 R4 R4 G8",
        ),
    ],
)
def test_tensor_parallel_collectives(config: TrainerConfig, expected: str) -> None:
    assert tensor_parallel(config) == expected


@pytest.mark.parametrize(
    ("sync", "dtypes"), [("each", {"bfloat16"}), ("last", {"float32"})], ids=["each", "accumulated in fp32"]
)
def test_gradients_of_norms_are_reduced_in_their_own_dtype(sync: str, dtypes: set[str]) -> None:
    config = but(precision="bf16-mp", accumulation=2, gradient_sync=sync)
    events = tensor_parallel_events(config, resolve_mesh(config.mesh, world_size=4))
    assert {event.dtype for event in events if event.numel == 4} == dtypes


def test_shapes_of_uneven_shards_and_sharded_dimensions() -> None:
    """Biases are sharded like the output that they are added to."""
    first, last = (local_shapes(CONFIG.model, tp=2, tp_rank=rank) for rank in (0, 1))
    assert first["tok_embeddings.weight"] == (2, 4)
    assert last["tok_embeddings.weight"] == last["output.weight"] == (1, 4)
    assert first["layers.0.attention.wq.weight"] == (2, 4)
    assert first["layers.0.feed_forward.w2.weight"] == (4, 3)
    assert first["norm.weight"] == (4,)
    assert sharded_dim("layers.0.attention.wq.bias") == 0
    assert sharded_dim("layers.0.attention.wo.bias") is None
    with pytest.raises(ValueError, match=r"layers.0.router.weight.*plan"):
        sharded_dim("layers.0.router.weight")


def test_traffic_of_a_step_computed_manually() -> None:
    # Shards of rows: embedding 1 x 4; block: norms 2 + 2, wq wk wv wo 4 each, w1 w3 of 3 rows 2 x 4, w2 2 x 3;
    # norm and output 2 + 4. tp rank 1 has one row of embedding and output, padded to the same.
    block = 4 + 4 * 4 + 2 * 8 + 6
    for tp_rank in (0, 1):
        traffic = add_up(step_events(CONFIG, resolve_mesh(CONFIG.mesh, world_size=4), tp_rank=tp_rank))
        assert traffic == {
            ("data", "dp_shard", "all_reduce", "int64"): Traffic(1, 8),
            ("forward", "dp_shard", "all_gather", "float32"): Traffic(3, 4 * (4 + block + 6)),
            ("forward", "tp", "all_gather", "float32"): Traffic(4, 4 * (3 * 16 + 16)),
            ("forward", "tp", "reduce_scatter", "float32"): Traffic(3, 4 * 3 * 32),
            ("backward", "dp_shard", "all_gather", "float32"): Traffic(2, 4 * (4 + block)),
            ("backward", "dp_shard", "reduce_scatter", "float32"): Traffic(3, 4 * 2 * (4 + block + 6)),
            ("backward", "tp", "all_gather", "float32"): Traffic(3, 4 * 3 * 16),
            ("backward", "tp", "reduce_scatter", "float32"): Traffic(3, 4 * 3 * 32),
            ("backward", "tp", "all_reduce", "float32"): Traffic(3, 4 * 3 * 4),
            ("clip", "dp_shard", "all_reduce", "float32"): Traffic(1, 4 * 12),
            ("clip", "tp", "all_reduce", "float32"): Traffic(1, 4 * 12),
            ("idle", "dp_shard", "all_reduce", "float32"): Traffic(1, 4),
        }


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("all_gather", [8, 8, 8]),  # three inputs of others, as they are
        ("reduce_scatter", [2, 2, 2]),  # three partial sums of a quarter
        ("all_reduce", [2, 2, 2, 2, 2, 2]),  # first the sums, then the quarters that are complete
    ],
)
def test_bytes_that_each_of_four_ranks_sends(kind: str, messages: list[int]) -> None:
    assert sent_bytes(kind, 8, ranks=4) == sum(messages)
    assert sent_bytes(kind, 8, ranks=1) == 0
    with pytest.raises(ValueError, match="collective all_to_all: only all_gather, reduce_scatter"):
        sent_bytes("all_to_all", 8, ranks=4)


@pytest.mark.parametrize(("group", "ranks"), [("dp_shard", 4), ("tp", 8), ("dp_shard/2", 2), ("world", 96)])
def test_ranks_of_a_group(group: str, ranks: int) -> None:
    assert ranks_in(group, ParallelDims(dp_replicate=3, dp_shard=4, tp=8)) == ranks


def test_norms_are_reduced_in_the_largest_dtype_of_their_mesh_if_there_is_one() -> None:
    names, dims = ["output.weight", "norm.weight"], resolve_mesh(CONFIG.mesh, world_size=4)
    assert {event.dtype for event in clip_events(names, but(precision="bf16-mixed"), dims)} == {"float32"}
    apart = clip_events(names, but(precision="bf16-mixed", sequence_parallel=False, norms_in_tp=False), dims)
    expected = [("dp_shard", "bfloat16"), ("tp", "bfloat16"), ("dp_shard", "float32")]
    assert [(event.group, event.dtype) for event in apart] == expected
    alone = but(mesh=MeshConfig(dp_shard=1))
    assert step_events(alone, resolve_mesh(alone.mesh, world_size=1), tp_rank=0) == []
