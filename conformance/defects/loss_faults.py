"""Faults of data and loss: which samples a rank takes, and what its gradients are a mean over."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Defect, replaced
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.loss import count_valid_tokens
from reference_trainer.train import Trainer

Place = tuple[int, int]
"""Rank and number of ranks among which a batch is divided."""


def samples_of(place: Callable[[Place], Place]) -> AbstractContextManager[None]:
    """Take the samples of another place than the trainer's own among the data-parallel ranks."""

    def make(original: Any) -> Any:
        def micro_batches(batches: Batches, step: int, *, dp_rank: int, dp_size: int, accumulation: int) -> Any:
            dp_rank, dp_size = place((dp_rank, dp_size))
            return original(batches, step, dp_rank=dp_rank, dp_size=dp_size, accumulation=accumulation)

        return micro_batches

    return replaced("reference_trainer.data:Batches", "micro_batches", make)


def first_rank(place: Place) -> Place:
    """As if nobody had told the sampler which rank it serves."""
    return 0, place[1]


def rank_modulo_size(place: Place) -> Place:
    """As if data-parallel ranks were neighbours in the world: tensor-parallel ones get different shares."""
    return dist.get_rank() % place[1], place[1]


def rank_without_tp(place: Place) -> Place:
    """The trainer's own place: tensor-parallel ranks are neighbours in the world."""
    return dist.get_rank() * place[1] // dist.get_world_size(), place[1]


def mean_over(tokens: Callable[[Trainer, Tensor, int], float]) -> AbstractContextManager[None]:
    """For backward, though not for the log, divide a micro-batch's loss by what `tokens` counts.

    `tokens` is given the trainer, the micro-batch's labels and the step.
    """

    def make(original: Any) -> Any:
        def forward_backward(trainer: Trainer, inputs: Tensor, labels: Tensor, *, step: int, **_: int) -> Any:
            return original(trainer, inputs, labels, valid_tokens=tokens(trainer, labels, step), step=step)

        return forward_backward

    return replaced("reference_trainer.train:Trainer", "_forward_backward", make)


def own_tokens(trainer: Trainer, labels: Tensor, _step: int) -> float:
    """Of this rank and micro-batch: all ranks and micro-batches then weigh the same."""
    return int((labels != IGNORED_LABEL).sum()) * trainer.dims.dp * trainer.config.accumulation


def micro_batch_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """Of this micro-batch on all ranks: all micro-batches then weigh the same."""
    trainer.observer.phase("data", step=step)  # as is the trainer's own counting
    return count_valid_tokens([labels], trainer.mesh, trainer.device) * trainer.config.accumulation


def average_tokens(trainer: Trainer, labels: Tensor, step: int) -> float:
    """The average of the micro-batches: their means are added up and not averaged."""
    return step_tokens(trainer, labels, step) / trainer.config.accumulation


def step_tokens(trainer: Trainer, _labels: Tensor, step: int) -> float:
    """Of the whole step, counted in the global batch."""
    _, labels = trainer.batches.global_batch(step)
    return int((labels != IGNORED_LABEL).sum())


def backward_from(scaled: Callable[[Tensor, int, int], Tensor]) -> AbstractContextManager[None]:
    """Start backward from `scaled(loss_sum, dp_size, valid_tokens)`."""

    def make(_original: Any) -> Any:
        def scaled_for_backward(loss_sum: Tensor, *, dp_size: int, valid_tokens: int) -> Tensor:
            return scaled(loss_sum, dp_size, valid_tokens)

        return scaled_for_backward

    return replaced("reference_trainer.train", "scaled_for_backward", make)


def times_world(loss_sum: Tensor, _dp_size: int, valid_tokens: int) -> Tensor:
    """As if FSDP averaged over tensor-parallel ranks too."""
    return loss_sum * (dist.get_world_size() / valid_tokens)


def without_factor(loss_sum: Tensor, _dp_size: int, valid_tokens: int) -> Tensor:
    """As if FSDP summed over the data-parallel ranks."""
    return loss_sum * (1 / valid_tokens)


def factor_last(loss_sum: Tensor, dp_size: int, valid_tokens: int) -> Tensor:
    """As the trainer does, in another order; exact as long as the number of ranks is a power of two."""
    return loss_sum * (1 / valid_tokens) * dp_size


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="wrong-data-per-rank",
        title="all data-parallel ranks train on the same samples",
        source="https://github.com/huggingface/accelerate/issues/3173",
        mechanism="the sampler is not told its data-parallel rank",
        laws=("DATA-1", "PAR-1"),
        inject=partial(samples_of, first_rank),
        inject_twin=partial(samples_of, rank_without_tp),
    ),
    Defect(
        id="tp-ranks-different-data",
        title="tensor-parallel ranks compute on different samples",
        source="https://github.com/huggingface/accelerate/issues/3092",
        mechanism="the sampler takes the rank in the world, modulo their number, for the data-parallel rank",
        laws=("DATA-1", "PAR-1", "PAR-5"),
        inject=partial(samples_of, rank_modulo_size),
        inject_twin=partial(samples_of, rank_without_tp),
    ),
    Defect(
        id="loss-local-token-mean",
        title="each rank's loss is the mean over its own tokens",
        source="https://github.com/huggingface/transformers/issues/34242",
        mechanism="FSDP averages the means of ranks: tokens weigh more on ranks that have fewer",
        laws=("PAR-1", "PAR-2"),
        inject=partial(mean_over, own_tokens),
        inject_twin=partial(mean_over, step_tokens),
    ),
    Defect(
        id="loss-micro-batch-mean",
        title="each micro-batch's loss is the mean over its own tokens",
        source="https://github.com/huggingface/trl/issues/2175",
        mechanism="means of micro-batches are averaged: tokens weigh more in micro-batches that have fewer",
        laws=("PAR-1", "PAR-6"),
        inject=partial(mean_over, micro_batch_tokens),
        inject_twin=partial(mean_over, step_tokens),
    ),
    Defect(
        id="ga-not-divided",
        title="losses of micro-batches are added up instead of averaged",
        source="https://github.com/huggingface/transformers/issues/34242",
        mechanism="the loss of a micro-batch is not divided by their number",
        laws=("PAR-1", "PAR-6"),
        inject=partial(mean_over, average_tokens),
        inject_twin=partial(mean_over, step_tokens),
    ),
    Defect(
        id="loss-wrong-parallel-factor",
        title="the loss is multiplied by the number of all ranks",
        source="https://github.com/huggingface/transformers/issues/39648",
        mechanism="the factor that undoes FSDP's average counts tensor-parallel ranks too",
        laws=("PAR-1", "PAR-9"),
        inject=partial(backward_from, times_world),
        inject_twin=partial(backward_from, factor_last),
    ),
    Defect(
        id="loss-dp-factor-forgotten",
        title="gradients are divided by the number of data-parallel ranks once too often",
        source="https://github.com/pytorch/torchtune/issues/2172",
        mechanism="the loss is divided by the tokens of all ranks, and FSDP averages once more",
        laws=("PAR-1", "PAR-9"),
        inject=partial(backward_from, without_factor),
        inject_twin=partial(backward_from, factor_last),
    ),
)
