"""Loss scaling (arXiv:1710.03740 section 3.2): the scale of each step, and the collectives by which ranks agree on it.

Source: torch.amp.GradScaler. A step in which a gradient overflows is skipped and the scale halved; after
`growth_interval` steps in a row without overflow it is doubled.
"""

from collections.abc import Sequence

from conformance.oracles.schedule import Event
from reference_trainer.config import LossScaleConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.precision import PRECISIONS


def loss_scales(options: LossScaleConfig, skipped: Sequence[bool]) -> list[float]:
    """Return the scale of each step of a run; `skipped` is True for each skipped step."""
    scale, in_a_row, scales = options.initial, 0, []
    for overflowed in skipped:
        scales.append(scale)
        in_a_row = 0 if overflowed else in_a_row + 1
        if overflowed:
            scale /= 2
        elif in_a_row == options.growth_interval:
            scale, in_a_row = scale * 2, 0
    return scales


def unscale_events(config: TrainerConfig, dims: ParallelDims) -> list[Event]:
    """Return the collectives by which ranks agree on an overflow: each is the maximum of a number.

    torch asks the ranks over which the first gradient, the embedding's, is sharded; then the trainer asks all ranks.
    """
    if not PRECISIONS[config.precision].scales_loss:
        return []
    sizes = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, "tp": dims.tp}
    wide = [name for name, size in sizes.items() if size > 1]
    sharding = [name for name in wide if name in ("dp_shard", "tp")]
    everybody = "world" if len(wide) > 1 else next(iter(wide), "dp_shard")
    return [Event("unscale", "all_reduce", group, 1, "float32", "MAX") for group in (*sharding, everybody)]
