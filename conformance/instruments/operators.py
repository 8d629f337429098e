"""Calls of each operator by phase: they show what is recomputed, and which implementation ran."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reference_trainer.observer import Observer, Phase

_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip", "optimizer")


class OperatorCount(Observer):
    """Listener of the dispatch tap that counts operators. What inductor has fused is no operator, and not seen."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {phase: Counter() for phase in _PHASES}
        self._phase: Phase = "build"

    def facts(self) -> dict[str, dict[str, int]]:
        """Return the number of calls in all steps by phase (forward, backward, clip, optimizer) and operator's name."""
        return {phase: dict(sorted(counts.items())) for phase, counts in self._counts.items()}

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase."""
        self._phase = name

    def listen(self, func: Any, args: Sequence[Any]) -> None:
        """Count a call; to be a listener of a `DispatchTap`."""
        if self._phase in self._counts:
            self._counts[self._phase][func._schema.name] += 1
