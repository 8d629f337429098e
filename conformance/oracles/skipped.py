"""Blocks that forward passes leave out, from the configuration."""

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from reference_trainer.config import Skipped, TrainerConfig
from reference_trainer.model import Transformer

_BLOCK = re.compile(r"layers\.(\d+)\b")


def computed_blocks(config: TrainerConfig, micro_batch: int, *, step: int = 0) -> list[int]:
    """Return the blocks that the forward pass of a micro-batch computes, in their order."""
    return [block for block in range(config.model.n_layers) if not _is_left_out(block, config, micro_batch, step)]


def is_computed(name: str, config: TrainerConfig, micro_batches: Sequence[int], *, step: int = 0) -> bool:
    """Return whether any of these micro-batches computes a module, or with a parameter, of this name."""
    match = _BLOCK.match(name)
    return match is None or any(
        not _is_left_out(int(match[1]), config, micro_batch, step) for micro_batch in micro_batches
    )


def leave_out(model: Transformer, config: TrainerConfig, micro_batch: int, *, step: int = 0) -> None:
    """Let the next forward pass of a model be that of a micro-batch."""
    computed = computed_blocks(config, micro_batch, step=step)
    for index, block in model.blocks.items():
        block.is_skipped = index not in computed


def is_used(name: str, config: TrainerConfig, *, step: float = math.inf) -> bool:
    """Return whether a step computes with a parameter; by default whether any does."""
    if step == math.inf:
        match = _BLOCK.match(name)
        return match is None or not all(_passes(int(match[1]), config))
    return is_computed(name, config, range(config.accumulation), step=int(step))


def passes_of_step(config: TrainerConfig, step: int) -> tuple[Skipped, ...]:
    """Return the blocks that are left out if all steps are like this one."""
    numbers = range(config.accumulation)
    return tuple(
        replace(each, passes=tuple(_is_left_out(each.block, config, number, step) for number in numbers))
        for each in config.skipped
    )


def _is_left_out(block: int, config: TrainerConfig, micro_batch: int, step: int) -> bool:
    passes = _passes(block, config)
    return passes[(step * config.accumulation + micro_batch) % len(passes)]


def _passes(block: int, config: TrainerConfig) -> tuple[bool, ...]:
    return next((each.passes for each in config.skipped if each.block == block), (False,))
