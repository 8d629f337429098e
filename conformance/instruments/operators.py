"""Calls of each operator by phase, which show recomputation, and the implementation that ran."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from conformance.instruments.dispatch_tap import Handler
from reference_trainer.observer import Observer, Phase

_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip", "optimizer")


class OperatorCount(Observer):
    """Listener of the dispatch tap that counts operators, except those that inductor has fused."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {phase: Counter() for phase in _PHASES}
        self._current: Counter[str] | None = None

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls in all steps by phase (forward, backward, clip, optimizer) and operator's name."""
        return {phase: dict(sorted(counts.items())) for phase, counts in self._counts.items()}

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase."""
        self._current = self._counts.get(name)

    def listen(self, func: Any) -> Handler:
        """Return the handler that counts the calls of an operator, as a listener of a `DispatchTap`."""
        name = func._schema.name

        def count(_args: Sequence[Any]) -> None:
            if self._current is not None:
                self._current[name] += 1

        return count
