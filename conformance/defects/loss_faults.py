"""Faults of data and loss: wrong samples of a rank, and means over wrong tokens."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.loss import count_valid_tokens
from reference_trainer.train import Trainer

RankAndSize = tuple[int, int]
"""Data-parallel rank, and number of data-parallel ranks over which a batch is sharded."""


def samples_of(choose: Callable[[RankAndSize], RankAndSize]) -> Injection:
    """Take the samples of the data-parallel rank that `choose` returns for the trainer's own."""

    def micro_batches(
        original: Call, batches: Batches, step: int, *, dp_rank: int, dp_size: int, accumulation: int
    ) -> Any:
        dp_rank, dp_size = choose((dp_rank, dp_size))
        return original(batches, step, dp_rank=dp_rank, dp_size=dp_size, accumulation=accumulation)

    return replaced_call("reference_trainer.data:Batches", "micro_batches", micro_batches)


def rank_without_tp(own: RankAndSize) -> RankAndSize:
    """Return the data-parallel rank of a global rank: tensor-parallel ranks are neighbours in the world."""
    return dist.get_rank() * own[1] // dist.get_world_size(), own[1]


@defect("DATA-1 PAR-1", "id = dp2-fp32-default-meta", "huggingface/accelerate/issues/3173")
def wrong_data_per_rank(benign: bool) -> Injection:
    """The sampler ignores its data-parallel rank: all ranks train on the same samples."""
    return samples_of(lambda own: rank_without_tp(own) if benign else (0, own[1]))


def rank_modulo_size(own: RankAndSize) -> RankAndSize:
    """Return the global rank modulo the data-parallel size, which differs between tensor-parallel ranks."""
    return dist.get_rank() % own[1], own[1]


@defect("DATA-1 PAR-1 PAR-5", "id = dp2-tp2-fp32-default-meta-nosp", "huggingface/accelerate/issues/3092")
def tp_ranks_different_data(benign: bool) -> Injection:
    """The sampler takes the global rank for the data-parallel rank: tensor-parallel ranks get different samples."""
    return samples_of(rank_without_tp if benign else rank_modulo_size)


def mean_over(tokens: Callable[[Trainer, Tensor, int], float]) -> Injection:
    """Divide a micro-batch's loss by `tokens(trainer, labels, step)` for backward, though not for the log.

    The labels are those of the micro-batch, shape (batch, seq_len), int64.
    """

    def forward_backward(
        original: Call, trainer: Trainer, inputs: Tensor, labels: Tensor, *, step: int, **_: int
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


@defect(
    "PAR-1 PAR-2", "id in (dp2-fp32-default-meta-sgd, dp2-bf16mp-default-meta)", "huggingface/transformers/issues/34242"
)
def loss_local_token_mean(benign: bool) -> Injection:
    """FSDP averages the ranks' token means: tokens weigh more on ranks that have fewer."""
    return mean_over(step_tokens if benign else own_tokens)


def micro_batch_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """Count the tokens of this micro-batch on all ranks: all micro-batches then weigh the same."""
    trainer.observer.phase("data", step=step)  # as is the trainer's own counting
    return count_valid_tokens([labels], trainer.mesh, trainer.device) * trainer.config.accumulation


@defect("PAR-1 PAR-6", "id = dp2-fp32-default-meta-acc2", "huggingface/trl/issues/2175")
def loss_micro_batch_mean(benign: bool) -> Injection:
    """Token means of micro-batches are averaged: tokens weigh more in micro-batches that have fewer."""
    return mean_over(step_tokens if benign else micro_batch_tokens)


def average_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """Return the average tokens of a micro-batch: the means of micro-batches are then added up and not averaged."""
    return step_tokens(trainer, labels, step) / trainer.config.accumulation


@defect("PAR-1 PAR-6", "id = dp2-fp32-default-meta-acc2", "huggingface/transformers/issues/34242")
def ga_not_divided(benign: bool) -> Injection:
    """The loss of a micro-batch is not divided by the number of micro-batches: losses are summed, not averaged."""
    return mean_over(step_tokens if benign else average_tokens)


def factor_last(loss_sum: Tensor, dp_size: int, valid_tokens: int) -> Tensor:
    """Scale the loss in another order than the trainer; exact if the number of ranks is a power of two."""
    return loss_sum * (1 / valid_tokens) * dp_size


@defect(
    "PAR-1 PAR-9",
    "id in (tp2-fp32-default-meta, tp2-fp32-default-meta-integer-sgd-noclip-steps1)",
    "huggingface/transformers/issues/39648",
)
@instead_of("reference_trainer.train", "scaled_for_backward")
def loss_wrong_parallel_factor(
    benign: bool, _original: object, loss_sum: Tensor, *, dp_size: int, valid_tokens: int
) -> Tensor:
    """The loss factor that undoes FSDP's average counts tensor-parallel ranks as well."""
    return factor_last(loss_sum, dp_size, valid_tokens) if benign else loss_sum * (dist.get_world_size() / valid_tokens)


@defect(
    "PAR-1 PAR-9",
    "id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-integer-sgd-noclip-steps1)",
    "pytorch/torchtune/issues/2172",
)
@instead_of("reference_trainer.train", "scaled_for_backward")
def loss_dp_factor_forgotten(
    benign: bool, _original: object, loss_sum: Tensor, *, dp_size: int, valid_tokens: int
) -> Tensor:
    """The loss is divided by the tokens of all ranks, and FSDP averages once more."""
    return factor_last(loss_sum, dp_size, valid_tokens) if benign else loss_sum * (1 / valid_tokens)
