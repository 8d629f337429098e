"""Faults of data and loss: which samples a rank takes, and over which tokens the loss is a mean."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.loss import count_valid_tokens
from reference_trainer.train import Trainer

RankAndSize = tuple[int, int]
"""Data-parallel rank, and number of data-parallel ranks over which a batch is sharded."""


def samples_of(choose: Callable[[RankAndSize], RankAndSize]) -> AbstractContextManager[None]:
    """Take the samples of the data-parallel rank that `choose` returns for the trainer's own."""

    def micro_batches(
        original: Callable[..., Any], batches: Batches, step: int, *, dp_rank: int, dp_size: int, accumulation: int
    ) -> Any:
        dp_rank, dp_size = choose((dp_rank, dp_size))
        return original(batches, step, dp_rank=dp_rank, dp_size=dp_size, accumulation=accumulation)

    return replaced_call("reference_trainer.data:Batches", "micro_batches", micro_batches)


def first_rank(own: RankAndSize) -> RankAndSize:
    """Return rank 0, the default of a sampler that nobody has told its rank."""
    return 0, own[1]


def rank_without_tp(own: RankAndSize) -> RankAndSize:
    """Return the trainer's own rank, computed from the world's: tensor-parallel ranks are neighbours in the world."""
    return dist.get_rank() * own[1] // dist.get_world_size(), own[1]


WRONG_DATA_PER_RANK = Defect(
    id="wrong-data-per-rank",
    title="all data-parallel ranks train on the same samples",
    source="https://github.com/huggingface/accelerate/issues/3173",
    mechanism="the sampler is not told its data-parallel rank",
    laws=("DATA-1", "PAR-1"),
    cells="id = dp2-fp32-default-meta",
    inject=partial(samples_of, first_rank),
    inject_twin=partial(samples_of, rank_without_tp),
)


def rank_modulo_size(own: RankAndSize) -> RankAndSize:
    """Return a rank that takes data-parallel ranks for neighbours in the world: tensor-parallel ranks then differ."""
    return dist.get_rank() % own[1], own[1]


TP_RANKS_DIFFERENT_DATA = Defect(
    id="tp-ranks-different-data",
    title="tensor-parallel ranks compute on different samples",
    source="https://github.com/huggingface/accelerate/issues/3092",
    mechanism="the sampler takes the global rank, modulo the number of data-parallel ranks, for the data-parallel rank",
    laws=("DATA-1", "PAR-1", "PAR-5"),
    cells="id = dp2-tp2-fp32-default-meta-nosp",
    inject=partial(samples_of, rank_modulo_size),
    inject_twin=partial(samples_of, rank_without_tp),
)


def mean_over(tokens: Callable[[Trainer, Tensor, int], float]) -> AbstractContextManager[None]:
    """Divide a micro-batch's loss by `tokens(trainer, labels, step)` for backward, though not for the log.

    The labels are those of the micro-batch, shape (batch, seq_len), int64.
    """

    def forward_backward(
        original: Callable[..., Any], trainer: Trainer, inputs: Tensor, labels: Tensor, *, step: int, **_: int
    ) -> Any:
        return original(trainer, inputs, labels, valid_tokens=tokens(trainer, labels, step), step=step)

    return replaced_call("reference_trainer.train:Trainer", "_forward_backward", forward_backward)


def own_tokens(trainer: Trainer, labels: Tensor, _step: int) -> float:
    """Count the tokens of this rank's micro-batch: all ranks and micro-batches then weigh the same."""
    return int((labels != IGNORED_LABEL).sum()) * trainer.dims.dp * trainer.config.accumulation


def step_tokens(trainer: Trainer, _labels: Tensor, step: int) -> float:
    """Count the tokens of all micro-batches of the step on all ranks."""
    _, labels = trainer.batches.global_batch(step)
    return int((labels != IGNORED_LABEL).sum())


LOSS_LOCAL_TOKEN_MEAN = Defect(
    id="loss-local-token-mean",
    title="each rank's loss is the mean over its own tokens",
    source="https://github.com/huggingface/transformers/issues/34242",
    mechanism="FSDP averages the means of ranks: tokens weigh more on ranks that have fewer",
    laws=("PAR-1", "PAR-2"),
    cells="id in (dp2-fp32-default-meta-sgd, dp2-bf16mp-default-meta)",
    inject=partial(mean_over, own_tokens),
    inject_twin=partial(mean_over, step_tokens),
)


def micro_batch_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """Count the tokens of this micro-batch on all ranks: all micro-batches then weigh the same."""
    trainer.observer.phase("data", step=step)  # as is the trainer's own counting
    return count_valid_tokens([labels], trainer.mesh, trainer.device) * trainer.config.accumulation


LOSS_MICRO_BATCH_MEAN = Defect(
    id="loss-micro-batch-mean",
    title="each micro-batch's loss is the mean over its own tokens",
    source="https://github.com/huggingface/trl/issues/2175",
    mechanism="means of micro-batches are averaged: tokens weigh more in micro-batches that have fewer",
    laws=("PAR-1", "PAR-6"),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(mean_over, micro_batch_tokens),
    inject_twin=partial(mean_over, step_tokens),
)


def average_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """Return the average tokens of a micro-batch: the means of micro-batches are then added up and not averaged."""
    return step_tokens(trainer, labels, step) / trainer.config.accumulation


MICRO_BATCH_LOSSES_SUMMED = Defect(
    id="ga-not-divided",
    title="losses of micro-batches are added up instead of averaged",
    source="https://github.com/huggingface/transformers/issues/34242",
    mechanism="the loss of a micro-batch is not divided by the number of micro-batches",
    laws=("PAR-1", "PAR-6"),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(mean_over, average_tokens),
    inject_twin=partial(mean_over, step_tokens),
)


def backward_from(scaled: Callable[[Tensor, int, int], Tensor]) -> AbstractContextManager[None]:
    """Start backward from the scalar `scaled(loss_sum, dp_size, valid_tokens)`."""

    def scaled_for_backward(_original: object, loss_sum: Tensor, *, dp_size: int, valid_tokens: int) -> Tensor:
        return scaled(loss_sum, dp_size, valid_tokens)

    return replaced_call("reference_trainer.train", "scaled_for_backward", scaled_for_backward)


def times_world(loss_sum: Tensor, _dp_size: int, valid_tokens: int) -> Tensor:
    """Scale the loss for an FSDP that averages over tensor-parallel ranks as well."""
    return loss_sum * (dist.get_world_size() / valid_tokens)


def factor_last(loss_sum: Tensor, dp_size: int, valid_tokens: int) -> Tensor:
    """Scale the loss in another order than the trainer; exact if the number of ranks is a power of two."""
    return loss_sum * (1 / valid_tokens) * dp_size


LOSS_WRONG_PARALLEL_FACTOR = Defect(
    id="loss-wrong-parallel-factor",
    title="the loss is multiplied by the number of all ranks",
    source="https://github.com/huggingface/transformers/issues/39648",
    mechanism="the factor that undoes FSDP's average counts tensor-parallel ranks as well",
    laws=("PAR-1", "PAR-9"),
    cells="id in (tp2-fp32-default-meta, tp2-fp32-default-meta-integer-sgd-noclip-steps1)",
    inject=partial(backward_from, times_world),
    inject_twin=partial(backward_from, factor_last),
)


def without_factor(loss_sum: Tensor, _dp_size: int, valid_tokens: int) -> Tensor:
    """Scale the loss for an FSDP that sums over the data-parallel ranks."""
    return loss_sum * (1 / valid_tokens)


LOSS_DP_FACTOR_FORGOTTEN = Defect(
    id="loss-dp-factor-forgotten",
    title="gradients are divided by the number of data-parallel ranks once too often",
    source="https://github.com/pytorch/torchtune/issues/2172",
    mechanism="the loss is divided by the tokens of all ranks, and FSDP averages once more",
    laws=("PAR-1", "PAR-9"),
    cells="id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-integer-sgd-noclip-steps1)",
    inject=partial(backward_from, without_factor),
    inject_twin=partial(backward_from, factor_last),
)
