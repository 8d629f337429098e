"""Substrates: what a case runs on, and what a run there can prove.

`simulated`: one process is rank 0 of torch's fake process group, whose collectives do nothing. It proves which
collectives are issued and what is allocated, in worlds of any size. `gloo`: a process for each rank, all on the CPU. It
proves numerics too. `nccl-shared` (several ranks on a CUDA device) and `nccl` (a CUDA device for each rank) also prove
what streams and the caching allocator of a device do.
"""

from typing import Literal

Substrate = Literal["simulated", "gloo", "nccl-shared", "nccl"]
REAL: tuple[Substrate, ...] = ("gloo", "nccl-shared", "nccl")
"""Substrates with real processes and real collectives."""
SIMULATED: tuple[Substrate, ...] = ("simulated",)
"""One process and torch's fake process group: worlds of any size."""
CUDA: tuple[Substrate, ...] = ("nccl-shared", "nccl")
"""Substrates with streams and the caching allocator of a device."""
