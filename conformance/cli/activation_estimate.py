"""Estimate of the activations of a step, on a rank of any mesh.

They are what each layer saves for backward with fused attention and norms, and what its largest product needs in
addition.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from conformance.memory_segment import MemorySegment
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.memory_model import group_bytes
from conformance.oracles.schedule import groups
from conformance.oracles.tp_schedule import local_shapes
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_FP32_BYTES = 4


def kept_for_backward(profile: Sequence[MemorySegment]) -> int:
    """Return the bytes of the activations between forward and backward."""
    return next(segment.start_bytes for segment in profile if segment.mark == "backward")


def estimated_profile(config: TrainerConfig, dims: ParallelDims) -> list[MemorySegment]:
    """Return activations and gradients as a run without FSDP would hold them, group by group, of all micro-batches."""
    compute = 4 if dtype_policy(config.precision).compute == "float32" else 2
    model = config.model
    tokens = config.data.global_batch_size // (dims.dp * config.accumulation) * config.data.seq_len
    logits = tokens * model.vocab_size * _FP32_BYTES
    names = [group.name for group in groups(config)]
    saved = {name: _saved_bytes(config, dims, tokens, compute) for name in names}
    hidden = tokens * model.dim * compute // dims.tp
    # The embedding's output counts with the first block. The loss keeps logits as computed, and logarithms in fp32.
    saved |= {"tok_embeddings": 0, "output": 2 * hidden + logits * compute // _FP32_BYTES + logits}
    working = dict.fromkeys(names, tokens * max(model.ffn_dim, model.dim) * compute // dims.tp)
    if compute < _FP32_BYTES:
        working["output"] = max(working["output"], logits)  # raised to fp32, before the logarithm
    recomputed = _saved_bytes(replace(config, activation_checkpointing="none"), dims, tokens, compute)
    gradients = _unpadded(config, dims)
    segments, held = [MemorySegment("forward", 0, 0, 0)], 0
    for name in names:
        segments.append(MemorySegment(f"forward {name}", held, held + saved[name] + working[name], held + saved[name]))
        held += saved[name]
        segments.append(MemorySegment(f"after-forward {name}", held, held, held))
    gradients_of_logits = 2 * logits  # of the logarithms and of the logits
    segments.append(MemorySegment("backward", held, held + gradients_of_logits, held))
    for name in reversed(names):
        again = recomputed - saved[name] if name.startswith("layers.") else 0
        done = held - saved[name] + gradients[name]
        segments.append(MemorySegment(f"backward {name}", held, held + again + gradients[name] + working[name], done))
        held -= saved[name]
        segments.append(MemorySegment(f"gradients {name}", done, done, held))
        segments.append(MemorySegment(f"freed {name}", held, held, held))
    return [*segments, MemorySegment("end", held, held, held)] * config.accumulation


def _saved_bytes(config: TrainerConfig, dims: ParallelDims, tokens: int, compute: int) -> int:
    """Activations of one block that are saved for backward.

    Those are inputs and outputs of both norms, queries, keys and values (repeated for each query head), output of
    attention, and four times the hidden layer of the feed-forward (gate, its activation, up, their product).
    """
    model = config.model
    every = 8 * model.dim + 4 * model.ffn_dim
    width = {"none": every, "selective": every // 2, "full": model.dim}[config.activation_checkpointing]
    return tokens * width * compute // dims.tp


def _unpadded(config: TrainerConfig, dims: ParallelDims) -> dict[str, int]:
    unsharded = ParallelDims(dp_replicate=1, dp_shard=1, tp=dims.tp)
    return group_bytes(config, unsharded, local_shapes(config.model, tp=dims.tp, tp_rank=0))
