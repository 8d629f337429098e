"""Collectives of ring attention among ranks that share samples, in one step of one rank.

In forward each attention gathers the keys and values of all ranks at once, and in backward again. The sums of their
gradients travel with them in fp32: one exchange after each rank that has added its share, the last of which brings
them home. Sources: arXiv:2310.01889; `set_rotate_method` in
https://docs.pytorch.org/tutorials/unstable/context_parallel.html (an all-gather is torch's default).
"""

from msgspec.structs import replace

from conformance.oracles.dtype_policy import FP32, dtype_policy
from conformance.oracles.schedule import Event, subgroup
from conformance.oracles.skipped import computed_blocks
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


def ring_events(config: TrainerConfig, dims: ParallelDims, *, attended: int | None = None) -> list[Event]:
    """Return the collectives of a step, in their order.

    Keys and values have as many heads as queries, of which a tensor-parallel rank has some. `attended` is the width of
    all heads together, by default that of the trainer's model.
    """
    if dims.cp == 1:
        return []
    model, data, group = config.model, config.data, subgroup(dims.cp, dims)
    tokens = data.global_batch_size * data.seq_len // dims.dp // config.accumulation
    numel = 2 * tokens * (attended or model.dim) // dims.tp
    gather = Event("forward", "all_gather", group, numel, dtype_policy(config.precision).compute, is_of_ring=True)
    gather_again, evaluated = (replace(gather, phase=phase) for phase in ("backward", "evaluate"))
    gradients = Event("backward", "all_to_all", group, numel, FP32, is_of_ring=True)
    recomputed = int(config.activation_checkpointing == "full")
    events: list[Event] = []
    for micro_batch in range(config.accumulation):
        if micro_batch and config.evaluation != "none":
            events += model.n_layers * [evaluated]
        computed = len(computed_blocks(config, micro_batch))
        events += computed * [gather]
        events += computed * [*(1 + recomputed) * [gather_again], *dims.cp * [gradients]]
    return events
