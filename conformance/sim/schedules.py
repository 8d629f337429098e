"""Schedules of the simulated device: the order in which queued work runs.

Each is an order that a device could have taken. `eager`: the device keeps up with the host. `lazy`: it does nothing
until the host waits for it, and then only the work that this needs. `random:SEED`: a few steps of streams sampled from
the seed after each operator. `starve:N`: the N-th stream that is created from then on runs lazily, all others eagerly;
FSDP2 creates those of its copy-in, all-gathers, reduce-scatters and all-reduces in this order. `delay:FIRST-LAST`: the
process's operators with these numbers, from 1, and all behind them in their streams run lazily, all others eagerly.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

from reference_trainer.checks import UsageError

VARIABLE = "CONFORMANCE_SIM_SCHEDULE"
"""Environment variable with the schedule of a rank."""
DEFAULT = "lazy"
"""Default schedule of a session, the furthest from the CPU, on which everything runs at once."""
FSDP2_STREAMS = {"copy_in": 1, "all_gather": 2, "reduce_scatter": 3, "all_reduce": 4}
"""Numbers of FSDP2's streams in the order of their creation, which is that of `FSDPCommContext.lazy_init`."""
_POLICIES = ("eager", "lazy", "random", "starve", "delay")  # in the order of `Policy` in csrc/scheduler.h
_NUMBERS = {"random": r"(\d+)", "starve": r"(\d+)", "delay": r"(\d+)-(\d+)"}


@dataclass(frozen=True)
class Schedule:
    """Rule by which the simulated device chooses among the orders that streams and events allow."""

    policy: int
    number: int = 0
    """Seed of a random schedule, the number of the starved stream, or of the first delayed operator."""
    last: int = 0
    """Number of the last delayed operator."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the schedule of a text such as `random:7`. Raises UsageError for any other text."""
        name, _, number = text.partition(":")
        match = re.fullmatch(_NUMBERS.get(name, ""), number)
        if name not in _POLICIES or match is None:
            known = "eager, lazy, random:SEED, starve:NUMBER-OF-STREAM or delay:FIRST-LAST"
            raise UsageError(f"the schedule is {text!r}: write {known}")
        return cls(_POLICIES.index(name), *map(int, match.groups()))

    def for_rank(self, rank: int) -> "Schedule":
        """Return the schedule of a rank: random ones differ between ranks, all others are shared."""
        return replace(self, number=self.number + rank) if _POLICIES[self.policy] == "random" else self
