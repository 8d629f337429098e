"""Faults of dropout: masks that are equal where they must differ, or the reverse, and elements kept without a scale."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced_call
from conformance.defects.repetition_faults import copied, dropout_seed, recomputation
from reference_trainer.config import ModelConfig
from reference_trainer.model import Block
from reference_trainer.train import Trainer


class _Unscaled(nn.Dropout):
    """Dropout that does not rescale what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations that are kept, of any shape, as they are."""
        return super().forward(x) * (1.0 - self.p)


class _Copying(nn.Dropout):
    """Dropout of a copy."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what dropout makes of a copy of activations of any shape."""
        return super().forward(x.clone())


def dropout_module(module: type[nn.Dropout]) -> AbstractContextManager[None]:
    """Build blocks with this kind of dropout."""

    def init(original: Callable[..., None], block: Block, config: ModelConfig) -> None:
        original(block, config)
        block.dropout = module(config.dropout)

    return replaced_call("reference_trainer.model:Block", "__init__", init)


DROPOUT_NOT_RESCALED = Defect(
    id="dropout-not-rescaled",
    title="dropout does not rescale the elements that it keeps",
    source="https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html",
    mechanism="the output of dropout is multiplied by 1 - p",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-drop0.1",
    inject=partial(dropout_module, _Unscaled),
    inject_twin=partial(dropout_module, _Copying),
)


def seed_by(seed_of: Callable[[Trainer], int]) -> AbstractContextManager[None]:
    """Seed dropout once, with a function of the trainer."""

    def seed_dropout(_original: Callable[[Trainer], None], trainer: Trainer) -> None:
        torch.manual_seed(seed_of(trainer))

    return replaced_call("reference_trainer.train:Trainer", "_seed_dropout", seed_dropout)


def configured_seed(trainer: Trainer) -> int:
    """Return the seed of the configuration, which all ranks share."""
    return trainer.config.seed


def seed_of_world_rank(_trainer: Trainer) -> int:
    """Return a seed of the rank alone."""
    return 1 + torch.distributed.get_rank()


DROPOUT_SAME_ON_DATA_RANKS = Defect(
    id="dropout-same-on-data-ranks",
    title="all data-parallel ranks drop the same elements",
    source="https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html",
    mechanism="every rank seeds dropout with the seed of the configuration",
    laws=("PAR-10",),
    cells="id = dp2-fp32-default-meta-drop0.1",
    inject=partial(seed_by, configured_seed),
    inject_twin=partial(dropout_seed, from_system=False),
)
DROPOUT_DIFFERS_ON_REPLICAS = Defect(
    id="dropout-differs-on-replicas",
    title="tensor-parallel ranks drop other elements of the activations that they replicate",
    source="https://arxiv.org/abs/1909.08053",
    mechanism="dropout is seeded by the rank in the world, without sequence parallelism",
    laws=("PAR-10", "PAR-2"),
    cells="id = tp2-bf16params-never-checkpoint-dcp-sgd-noclip-norm1-cliploop-offloadcpu-nosp-normsdp-lp-tied-drop0.1",
    inject=partial(seed_by, seed_of_world_rank),
    inject_twin=partial(dropout_seed, from_system=False),
)
DROPOUT_RECOMPUTED_OTHERWISE = Defect(
    id="dropout-recomputed-otherwise",
    title="recomputation drops other elements than forward did",
    source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    mechanism="activations are checkpointed with preserve_rng_state=False",
    laws=("PAR-10", "PAR-2"),
    cells="id = dp2-bf16reduce-table-meta-uneven-sgd-norm1-cliploop-fpre1-bpre1-acfull-tied-drop0.1",
    inject=partial(recomputation, copied, preserve_rng_state=False),
    inject_twin=partial(recomputation, copied),
)


def seeded_before_each_step(*, by_step: bool) -> AbstractContextManager[None]:
    """Seed dropout anew before each step, with a seed of its own or always with the first."""

    def train_step(original: Callable[..., Any], trainer: Trainer, step: int) -> Any:
        trainer._seed_dropout()
        if by_step:
            torch.manual_seed(torch.initial_seed() ^ (step + 1))
        return original(trainer, step)

    return replaced_call("reference_trainer.train:Trainer", "train_step", train_step)


DROPOUT_SAME_IN_EVERY_STEP = Defect(
    id="dropout-same-in-every-step",
    title="every step drops the same elements",
    source="https://docs.pytorch.org/docs/stable/notes/randomness.html",
    mechanism="the generator is seeded anew before each step",
    laws=("PAR-10",),
    cells="id = dp2-fp32-default-meta-drop0.1",
    inject=partial(seeded_before_each_step, by_step=False),
    inject_twin=partial(seeded_before_each_step, by_step=True),
)
