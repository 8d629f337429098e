"""Schedules of the simulated device: the order in which queued work runs.

Each is an order that a device could have taken. `eager`: the device keeps up with the host. `lazy`: it does nothing
until the host waits for it, and then only the work that this needs. `random:SEED`: a few steps of streams sampled from
the seed after each operator. `starve:N`: the N-th stream that is created from then on runs lazily, all others eagerly;
FSDP2 creates those of its copy-in, all-gathers, reduce-scatters and all-reduces in this order.
"""

from dataclasses import dataclass
from typing import Self

from reference_trainer.checks import UsageError

VARIABLE = "CONFORMANCE_SIM_SCHEDULE"
"""Environment variable with the schedule of a rank."""
DEFAULT = "lazy"
"""Default schedule of a session, the furthest from the CPU, on which everything runs at once."""
FSDP2_STREAMS = {"copy_in": 1, "all_gather": 2, "reduce_scatter": 3, "all_reduce": 4}
"""Numbers of FSDP2's streams in the order of their creation, which is that of `FSDPCommContext.lazy_init`."""
_POLICIES = ("eager", "lazy", "random", "starve")  # in the order of `Policy` in csrc/scheduler.h


@dataclass(frozen=True)
class Schedule:
    """Rule by which the simulated device chooses among the orders that streams and events allow."""

    policy: int
    number: int = 0
    """Seed of a random schedule, or the number of the starved stream."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the schedule of a text such as `random:7`. Raises UsageError for any other text."""
        name, _, number = text.partition(":")
        takes_number = name in ("random", "starve")
        if name not in _POLICIES or takes_number != number.isdecimal() or (not takes_number and number):
            raise UsageError(f"the schedule is {text!r}: write eager, lazy, random:SEED or starve:NUMBER-OF-STREAM")
        return cls(_POLICIES.index(name), int(number or 0))

    def for_rank(self, rank: int) -> "Schedule":
        """Return the schedule of a rank: random ones differ between ranks, all others are shared."""
        return Schedule(self.policy, self.number + rank) if _POLICIES[self.policy] == "random" else self
