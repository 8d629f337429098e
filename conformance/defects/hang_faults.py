"""Faults that end in a hang: ranks that do not issue the same collectives."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.defects.injection import Defect, replaced
from reference_trainer.train import StepMetrics, Trainer


def evaluation(*, alone: bool) -> AbstractContextManager[None]:
    """Before the second step a forward without gradients: on the first rank alone, or on all."""

    def make(original: Any) -> Any:
        def train_step(trainer: Trainer, step: int) -> StepMetrics:
            if step == 1 and (dist.get_rank() == 0 or not alone):
                (inputs, _labels), *_ = trainer.batches.micro_batches(0, dp_rank=0, dp_size=1, accumulation=1)
                with torch.no_grad():
                    trainer.model(inputs)
            metrics: StepMetrics = original(trainer, step)
            return metrics

        return train_step

    return replaced("reference_trainer.train:Trainer", "train_step", make)


def batches_of_last_rank(*, fewer: int) -> AbstractContextManager[None]:
    """The last rank has so many micro-batches less than the others."""

    def make(original: Any) -> Any:
        def micro_batches(self: Any, step: int, **options: Any) -> Any:
            found = original(self, step, **options)
            last = dist.get_rank() == dist.get_world_size() - 1
            return found[: len(found) - fewer] if last else found

        return micro_batches

    return replaced("reference_trainer.data:Batches", "micro_batches", make)


DEFECTS = (
    Defect(
        id="rank0-evaluates-alone",
        title="The first rank evaluates the sharded model while the others train",
        source="https://github.com/facebookresearch/fairscale/issues/703",
        mechanism="a forward gathers parameters: the others never issue these all-gathers",
        laws=("PAR-1",),
        inject=partial(evaluation, alone=True),
        inject_twin=partial(evaluation, alone=False),
        hangs=True,
    ),
    Defect(
        id="uneven-micro-batches-hang",
        title="A rank runs out of data before the others",
        source="https://github.com/pytorch/pytorch/issues/158719",
        mechanism="the last rank has a micro-batch less, and does not gather and reduce for it",
        laws=("PAR-6",),
        inject=partial(batches_of_last_rank, fewer=1),
        inject_twin=partial(batches_of_last_rank, fewer=0),
        hangs=True,
    ),
)
