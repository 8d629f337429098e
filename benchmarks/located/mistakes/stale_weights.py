"""Weights that are stale after an evaluation: its forward pass gathers the root, which no backward pass reshards."""

import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.located.mistakes.trainer import Trainer, TrainingRun
from conformance.subjects.protocol import Batch

INTERVAL = 2
"""Steps from one evaluation to the next."""


class WrongRun(TrainingRun):
    """Run whose optimizer changes shards while the root's parameters stay gathered: the next step computes with them.

    FSDP2 keeps the parameters of the root after forward, for the backward pass that usually follows.
    """

    def evaluate(self, step: int, batch: Batch) -> None:
        """Compute the loss of every second step once more."""
        if step % INTERVAL == 1:
            with torch.no_grad():
                self.subject.loss(self.model, batch)  # mistake: stale-weights


class RightRun(TrainingRun):
    """Run that reshards the root after the evaluation."""

    def evaluate(self, step: int, batch: Batch) -> None:
        """Compute the loss of every second step once more."""
        if step % INTERVAL == 1:
            with torch.no_grad():
                self.subject.loss(self.model, batch)
            assert isinstance(self.model, FSDPModule)
            self.model.reshard()


class Wrong(Trainer):
    """Trainer with the mistake."""

    run_class = WrongRun


class Right(Trainer):
    """Trainer without it."""

    run_class = RightRun
