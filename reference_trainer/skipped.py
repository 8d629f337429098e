"""Blocks that some forward passes leave out, as layer drop and stochastic depth with a seed of all ranks do."""

from reference_trainer.config import Skipped
from reference_trainer.model import Transformer


def skip(model: Transformer, skipped: tuple[Skipped, ...], *, forward: int) -> None:
    """Let a forward pass of training, by its number from the start of the run, leave out the blocks that it skips.

    Evaluations compute all blocks: `model.eval()` does not look at what is skipped.
    """
    for each in skipped:
        model.blocks[each.block].is_skipped = each.passes[forward % len(each.passes)]
