"""Events that the trainer has reported; a run with missing events cannot be judged."""

from collections.abc import Iterable

from torch import Tensor

from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase

_EVENTS_OF_STEP = (
    "phase data",
    "batch",
    "phase forward",
    "phase backward",
    "gradients",
    "phase clip",
    "clipped",
    "phase optimizer",
    "phase idle",
)


class Events(Observer):
    """Check list of the events that every run has."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def missing(self, steps: Iterable[int]) -> list[str]:
        """Return the missing events of building and of these steps."""
        step_events = (f"{event} of step {step}" for step in steps for event in _EVENTS_OF_STEP)
        return [event for event in ("sharded", "initialized", *step_events) if event not in self._seen]

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember that a phase has begun."""
        self._seen.add(f"phase {name} of step {step}")

    def sharded(self, model: Transformer) -> None:
        """Remember that the model is sharded."""
        self._seen.add("sharded")

    def initialized(self, model: Transformer) -> None:
        """Remember that the model is initialised."""
        self._seen.add("initialized")

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """Remember that a batch has come."""
        self._seen.add(f"batch of step {step}")

    def gradients(self, model: Transformer, *, step: int) -> None:
        """Remember that gradients have come."""
        self._seen.add(f"gradients of step {step}")

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        """Remember that gradients are clipped."""
        self._seen.add(f"clipped of step {step}")
