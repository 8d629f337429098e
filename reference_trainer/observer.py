"""Where others may look into a run. The trainer calls these methods and knows nothing of who listens."""

from typing import Literal

from torch import Tensor

from reference_trainer.model import Transformer

Phase = Literal["build", "data", "forward", "backward", "clip", "optimizer", "idle"]


class Observer:
    """Does nothing; override what is of interest. Observers must not change the run."""

    def phase(self, name: Phase, *, step: int) -> None:
        """The given phase of the given step begins (step -1 while building)."""

    def sharded(self, model: Transformer) -> None:
        """The model has its final modules and placements, still on the meta device."""

    def materialized(self, model: Transformer) -> None:
        """`to_empty` has handed out memory; nothing is initialised yet."""

    def loaded(self, path: str) -> None:
        """Parameters hold what was read from this checkpoint; a cast may follow."""

    def initialized(self, model: Transformer) -> None:
        """Parameters and buffers hold their initial values."""

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """The (inputs, labels) that this rank is about to train on."""

    def gradients(self, model: Transformer, *, step: int) -> None:
        """All gradients of the step are reduced, none is clipped."""
