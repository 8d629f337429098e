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
    tokens = data.global_batch_size // dims.dp * data.seq_len
    dtype, group = dtype_policy(config.precision).compute, subgroup(dims.ep, dims)
    recomputed = int(config.activation_checkpointing != "none")
    events = []
    for phase, forwards, backwards in (("forward", 1, 0), ("backward", recomputed, 1)):
        numbers = Event(phase, "all_to_all", group, model.n_experts, "int64")
        rows = Event(phase, "all_to_all", group, tokens * model.experts_per_token * model.dim, dtype)
        events += [*forwards * [numbers], *(2 * (forwards + backwards)) * [rows]]
    return (model.n_layers if mixtures is None else mixtures) * events
