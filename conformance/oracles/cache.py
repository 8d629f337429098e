"""References computed once per process and shared by all cells with the same workload."""

from functools import lru_cache

import msgspec
import torch

from conformance.oracles.reference import ReferenceRun, train_bf16_emulation, train_reference
from reference_trainer.config import MeshConfig, TrainerConfig


def fp64_reference(config: TrainerConfig) -> ReferenceRun:
    """One process, fp64. Independent of mesh, precision, accumulation and everything that only moves data."""
    return _fp64(msgspec.structs.replace(_workload(config), accumulation=1))


def bf16_emulation(config: TrainerConfig, *, dp_size: int) -> ReferenceRun:
    """One process with the rounding points of bf16 mixed precision on `dp_size` data-parallel ranks."""
    return _bf16(_workload(config), dp_size)


@lru_cache(maxsize=64)
def _fp64(config: TrainerConfig) -> ReferenceRun:
    return train_reference(config, dtype=torch.float64)


@lru_cache(maxsize=64)
def _bf16(config: TrainerConfig, dp_size: int) -> ReferenceRun:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: the order of a kernel's sums depends on its number of threads
    try:
        return train_bf16_emulation(config, dp_size=dp_size)
    finally:
        torch.set_num_threads(threads)


def _workload(config: TrainerConfig) -> TrainerConfig:
    """The configuration without what must not change the result."""
    return msgspec.structs.replace(
        config,
        mesh=MeshConfig(),
        precision="fp32",
        reshard="default",
        sequence_parallel=True,
        loss_parallel=False,
        activation_checkpointing="none",
        compile="none",
    )
