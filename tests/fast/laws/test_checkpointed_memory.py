"""Memory that full activation checkpointing may hold of a block: its input, and nothing that it computes."""

from typing import Any

import pytest
import torch

from conformance.laws.memory.test_mem import require_inputs_of_blocks
from conformance.memory_segment import MemorySegment
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell

CELL = Cell(mesh="dp2-tp2", model="deep", activation_checkpointing="full")
INPUT_BYTES = 8 * 8 * 64 * 4
"""Half of 16 samples, half of 16 positions, 64 fp32 numbers each."""


@pytest.mark.parametrize("more_bytes", [0, 4])
def test_checkpointing_that_holds_more_than_inputs_fails(more_bytes: int) -> None:
    block_bytes = INPUT_BYTES + torch.get_rng_state().nbytes + more_bytes

    def measure(*_: Any) -> list[list[MemorySegment]]:
        return [[MemorySegment(f"after-forward layers.{i}", i * block_bytes, 0, 0) for i in range(3)]]

    if not more_bytes:
        require_inputs_of_blocks(measure, CELL)  # type: ignore[arg-type]
        return
    with pytest.raises(ConformanceFailure, match="kept of a block"):
        require_inputs_of_blocks(measure, CELL)  # type: ignore[arg-type]
