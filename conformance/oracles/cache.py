"""References computed once per process and shared by all cells with the same workload."""

from functools import lru_cache

import msgspec
import torch

from conformance.oracles.reference import ReferenceRun, train_reference
from reference_trainer.config import MeshConfig, TrainerConfig


def fp64_reference(config: TrainerConfig) -> ReferenceRun:
    """One process, fp64. Independent of mesh, precision, accumulation and everything that only moves data."""
    return _fp64(msgspec.structs.replace(_workload(config), accumulation=1))


@lru_cache(maxsize=64)
def _fp64(config: TrainerConfig) -> ReferenceRun:
    return train_reference(config, dtype=torch.float64)


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
