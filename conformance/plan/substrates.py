"""Substrates: backends that run a case, and the facts that a run there can prove.

`simulated`: one process is rank 0 of torch's fake process group, whose collectives do nothing. It proves
collectives and allocations, in worlds of any size. `gloo`: a process for each rank, all on the CPU. It
proves numerics too. `sim`: the same on a simulated accelerator, whose streams, pinned memory and caching allocator are
models; it proves the logic of FSDP, and never anything about a device. `nccl-shared` (several ranks on a CUDA device)
and `nccl` (a CUDA device for each rank) prove the behaviour of streams and of a device's caching allocator.
"""

from typing import Literal

Substrate = Literal["simulated", "gloo", "sim", "nccl-shared", "nccl"]
REAL: tuple[Substrate, ...] = ("gloo", "sim", "nccl-shared", "nccl")
"""Substrates with real processes and real collectives."""
SIM: tuple[Substrate, ...] = ("sim",)
"""Substrate of laws about streams and the caching allocator of other people's trainers."""
SIMULATED: tuple[Substrate, ...] = ("simulated",)
"""One process and torch's fake process group: worlds of any size."""
CUDA: tuple[Substrate, ...] = ("nccl-shared", "nccl")
"""Substrates with streams and the caching allocator of a device."""
STREAMS: tuple[Substrate, ...] = ("sim", *CUDA)
"""Substrates with streams and a caching allocator, of a device or of a model of one."""
