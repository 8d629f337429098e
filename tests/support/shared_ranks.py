"""Pools whose ranks serve one trainer after another."""

from typing import Any

import msgspec

from conformance.run.pool import Pools, RankReport, Task


class SharedRanks(Pools):
    """Pools for trainers that leave nothing behind in a process: the first run in new ranks takes longest.

    A trainer that asks for fresh processes gets them.
    """

    def run_ranks(self, task: Task, ranks: range, **options: Any) -> tuple[RankReport, ...]:
        """Run a task of a trainer on ranks that may have served others."""
        kind = task.kind.removeprefix(task.payload["subject"])
        return super().run_ranks(msgspec.structs.replace(task, kind=kind), ranks, **options)
