"""Faults that end in a hang: ranks that do not issue the same collectives."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.train import StepMetrics, Trainer


def evaluation(*, alone: bool) -> AbstractContextManager[None]:
    """Run a forward without gradients before the second step, on the first rank alone or on all."""

    def train_step(original: Callable[[Trainer, int], StepMetrics], trainer: Trainer, step: int) -> StepMetrics:
        if step == 1 and (dist.get_rank() == 0 or not alone):
            (inputs, _labels), *_ = trainer.batches.micro_batches(0, dp_rank=0, dp_size=1, accumulation=1)
            with torch.no_grad():
                trainer.model(inputs)
        return original(trainer, step)

    return replaced_call("reference_trainer.train:Trainer", "train_step", train_step)


RANK0_EVALUATES_ALONE = Defect(
    id="rank0-evaluates-alone",
    title="the first rank evaluates the sharded model while the others train",
    source="https://github.com/facebookresearch/fairscale/issues/703",
    mechanism="a forward gathers parameters: the others never issue these all-gathers",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(evaluation, alone=True),
    inject_twin=partial(evaluation, alone=False),
    hangs=True,
)


def batches_of_last_rank(*, fewer: int) -> AbstractContextManager[None]:
    """Give the last rank this many micro-batches fewer than the others."""

    def micro_batches(original: Callable[..., Any], batches: Any, step: int, **options: Any) -> Any:
        batches_of_step = original(batches, step, **options)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return batches_of_step[: len(batches_of_step) - fewer] if is_last else batches_of_step

    return replaced_call("reference_trainer.data:Batches", "micro_batches", micro_batches)


UNEVEN_MICRO_BATCHES_HANG = Defect(
    id="uneven-micro-batches-hang",
    title="a rank runs out of data before the others",
    source="https://github.com/pytorch/pytorch/issues/158719",
    mechanism="the last rank has one micro-batch fewer, and does not gather and reduce for it",
    laws=("PAR-6",),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(batches_of_last_rank, fewer=1),
    inject_twin=partial(batches_of_last_rank, fewer=0),
    hangs=True,
)
