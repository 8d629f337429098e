"""Where others may look into a run. The trainer calls these methods and knows nothing of who listens."""

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from reference_trainer.model import Transformer

Phase = Literal["build", "data", "forward", "backward", "unscale", "clip", "optimizer", "idle"]


class Observer:
    """Does nothing; override what is of interest. Observers must not change the run."""

    def phase(self, name: Phase, *, step: int) -> None:
        """The given phase of the given step begins (step -1 while building). Only scaled gradients are unscaled."""

    def reshard_policy(self, after_forward: dict[str, bool | int]) -> None:
        """What `fully_shard` is told about each group, by its name: whether it is resharded, or to how many ranks."""

    def sharded(self, model: Transformer) -> None:
        """The model has its final modules and placements: without memory, or already with its first weights."""

    def materialized(self, model: Transformer) -> None:
        """Parameters and buffers were given memory, and are not initialised yet. With init=layerwise this is called for
        each part of the model in turn: what was given memory before is initialised, the rest on the meta device."""

    def loaded(self, path: str, form: str) -> None:
        """Parameters hold what was read from this checkpoint, in a format of `weights.Format`; a cast may follow."""

    def initialized(self, model: Transformer) -> None:
        """Parameters and buffers hold their initial values."""

    def resumed(self, model: Transformer, optimizer: Optimizer) -> None:
        """Parameters and optimizer hold the state of a checkpoint; the steps after it follow."""

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """The (inputs, labels) that this rank is about to train on."""

    def gradients(self, model: Transformer, *, step: int) -> None:
        """All gradients of the step are reduced and unscaled, none is clipped."""

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        """Gradients are what the optimizer is about to step with; `norm`, a scalar, is their total norm before."""
