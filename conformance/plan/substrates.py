"""What a case can run on. DESIGN section 4 says what each of them can prove."""

from typing import Literal

Substrate = Literal["simulated", "gloo", "nccl-shared", "nccl"]
REAL: tuple[Substrate, ...] = ("gloo", "nccl-shared", "nccl")
"""Substrates with real processes and real collectives."""
SIMULATED: tuple[Substrate, ...] = ("simulated",)
"""One process and torch's fake process group: worlds of any size."""
CUDA: tuple[Substrate, ...] = ("nccl-shared", "nccl")
"""Substrates with streams, and the allocator of a device."""
