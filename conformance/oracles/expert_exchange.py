"""Exchange of rows between ranks that divide experts among them, in one step of a rank that gets as many as it sends.

Of each block a rank sends the rows of its tokens, one for each expert that is chosen for a token, and gets the results
back; in backward the gradients take the same way. Numbers of rows are exchanged before. Who gets how many rows, the
data alone tells: summed over all ranks the numbers are those of these events, whatever routers choose.
Source: arXiv:2006.16668, section 3.2.
"""

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.schedule import Event, subgroup
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


def exchange_events(config: TrainerConfig, dims: ParallelDims, *, mixtures: int | None = None) -> list[Event]:
    """Return the exchanges of one step; `mixtures` is the number of blocks with experts, None for all.

    Where forward is recomputed in backward, rows and their numbers are exchanged once more.
    """
    if dims.ep == 1:
        return []
    model, data = config.model, config.data
    tokens = data.global_batch_size // dims.dp // config.accumulation * data.seq_len
    dtype, group = dtype_policy(config.precision).compute, subgroup(dims.ep, dims)
    events = []
    for phase, forwards in forward_passes(config).items():
        backwards = config.accumulation if phase == "backward" else 0
        numbers = Event(phase, "all_to_all", group, model.n_experts, "int64")
        rows = Event(phase, "all_to_all", group, tokens * model.experts_per_token * model.dim, dtype)
        events += [*forwards * [numbers], *(2 * (forwards + backwards)) * [rows]]
    return (model.n_layers if mixtures is None else mixtures) * events


def forward_passes(config: TrainerConfig) -> dict[str, int]:
    """Return the number of forward passes through each block in a step, recomputed ones among them, by phase."""
    micro_batches = config.accumulation
    evaluated = {"evaluate": micro_batches - 1} if config.evaluation != "none" else {}
    return {
        **evaluated,
        "forward": micro_batches,
        "backward": micro_batches if config.activation_checkpointing != "none" else 0,
    }
