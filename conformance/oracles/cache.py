"""References computed once per process and shared by all cells with the same workload."""

from functools import lru_cache

import msgspec
import torch

from conformance.oracles.dropout import Masks
from conformance.oracles.reference import ReferenceRun, train_reference
from reference_trainer.config import LossScaleConfig, MeshConfig, TrainerConfig


def reference_run(config: TrainerConfig, *, dtype: torch.dtype, masks: Masks | None = None) -> ReferenceRun:
    """Return the training run of one process in `dtype`, for weights as for computation.

    The run does not depend on mesh, precision, accumulation and other options that only move data, except through the
    masks of dropout.
    """
    return _reference(_workload(config), dtype, masks)


@lru_cache(maxsize=64)
def _reference(config: TrainerConfig, dtype: torch.dtype, masks: Masks | None) -> ReferenceRun:
    return train_reference(config, dtype=dtype, masks=masks)


def _workload(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration without the options that must not change the result."""
    return msgspec.structs.replace(
        config,
        mesh=MeshConfig(),
        precision="fp32",
        loss_scale=LossScaleConfig(),
        tf32=False,
        reshard="default",
        memory_bytes=None,
        offload="none",
        pin_memory=False,
        sequence_parallel=True,
        norms_in_tp=True,
        loss_parallel=False,
        activation_checkpointing="none",
        compile="none",
        accumulation=1,
        gradient_sync="each",
        init="meta",
        checkpoint=None,
        checkpoint_reader="each-rank",
        optimizer=msgspec.structs.replace(config.optimizer, foreach_clip=True, implementation="auto"),
    )
