"""Which of the trainer's events have come: a run that does not report what it does cannot be judged."""

from collections.abc import Iterable

from torch import Tensor

from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase

_OF_STEP = (
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
    """Remembers each event that every run has."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def missing(self, steps: Iterable[int]) -> list[str]:
        """Events of building, and of these steps, that have not come."""
        expected = ["sharded", "initialized", *(f"{event} of step {step}" for step in steps for event in _OF_STEP)]
        return [event for event in expected if event not in self._seen]

    def phase(self, name: Phase, *, step: int) -> None:
        self._seen.add(f"phase {name} of step {step}")

    def sharded(self, model: Transformer) -> None:
        self._seen.add("sharded")

    def initialized(self, model: Transformer) -> None:
        self._seen.add("initialized")

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        self._seen.add(f"batch of step {step}")

    def gradients(self, model: Transformer, *, step: int) -> None:
        self._seen.add(f"gradients of step {step}")

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        self._seen.add(f"clipped of step {step}")
