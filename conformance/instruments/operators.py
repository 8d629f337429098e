"""Operator count: how often each operator ran in a phase, which shows what is computed again, and how it is."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reference_trainer.observer import Observer, Phase

_PHASES: tuple[Phase, ...] = ("forward", "backward", "clip")


class OperatorCount(Observer):
    """Listens to the dispatch tap. What inductor has fused is no operator any more, and not seen."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {phase: Counter() for phase in _PHASES}
        self._phase: Phase = "build"

    def facts(self) -> dict[str, dict[str, int]]:
        """For `forward`, `backward` and `clip`, over all steps, the number of calls by name, such as `aten::addmm`."""
        return {phase: dict(sorted(counts.items())) for phase, counts in self._counts.items()}

    def phase(self, name: Phase, *, step: int) -> None:
        self._phase = name

    def listen(self, func: Any, args: Sequence[Any]) -> None:
        if self._phase in self._counts:
            self._counts[self._phase][func._schema.name] += 1
