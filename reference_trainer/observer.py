"""Observer: interface through which instruments look into a run. The trainer depends on no implementation."""

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from reference_trainer.model import Transformer

Phase = Literal["build", "data", "evaluate", "forward", "backward", "unscale", "clip", "optimizer", "idle"]
"""Phases of a run; `idle` is the time between two steps."""
StageAction = Literal["forward", "backward", "backward-input", "backward-weight"]
"""Computation of a pipeline's stage on one micro-batch. Backward is one action, or that of the inputs and later that of
the parameters."""


class Observer:
    """Base of observers with empty methods to override. Observers must not change the run."""

    def phase(self, name: Phase, *, step: int) -> None:
        """A phase of a step begins (step -1 while building). Only gradients of a scaled loss are unscaled."""

    def reshard_policy(self, after_forward: dict[str, bool | int]) -> None:
        """Groups, by name, have their `reshard_after_forward`: True, False or a number of ranks."""

    def sharded(self, model: Transformer) -> None:
        """The model has its final modules and placements, on the meta device or already with its initial weights."""

    def materialized(self, model: Transformer) -> None:
        """Parameters and buffers were materialised, and are not initialised yet.

        With init=layerwise this method is called for each block, and then for the ends: tensors of earlier calls are
        initialised by then, those of later calls are on the meta device.
        """

    def loaded(self, path: str, form: str) -> None:
        """Parameters hold the values of this checkpoint, in a format of `weights.Format`; a cast may follow."""

    def initialized(self, model: Transformer) -> None:
        """Parameters and buffers hold their initial values."""

    def resumed(self, model: Transformer, optimizer: Optimizer) -> None:
        """Parameters and optimizer hold the state of a checkpoint; the steps after the checkpoint follow."""

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """This rank is about to train on these (inputs, labels), int64 of shape (samples, seq_len) each."""

    def stage_action(self, action: StageAction, *, stage: int, micro_batch: int, step: int) -> None:
        """A stage of the pipeline is about to compute; the phase `forward` or `backward` has begun."""

    def gradients(self, model: Transformer, *, step: int) -> None:
        """All gradients of the step are reduced and unscaled, none is clipped."""

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        """Gradients are clipped, and the optimizer steps next; `norm`, a scalar, was the total norm before."""
