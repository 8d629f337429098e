"""Arithmetic of a session's processors: that of torch and gloo, or one that adds in other orders.

A device adds in other orders than a processor, and NCCL than gloo. Laws that hold for one order alone would raise false
alarms there; `--kernels` and `--sums` show it without a device.
"""

import os
from typing import Literal, Self

import msgspec

from reference_trainer.checks import UsageError

KERNELS_VARIABLE = "CONFORMANCE_KERNELS"
SUMS_VARIABLE = "CONFORMANCE_SUMS"
_OTHER = "other:"

Sums = Literal["gloo", "ring", "tree"]
SUMS: tuple[Sums, ...] = ("gloo", "ring", "tree")


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Orders in which processors add."""

    kernels: str = "torch"
    """`torch`, or `other:SEED`: kernels that add in an order drawn from the seed, see `other_kernels`."""
    sums: Sums = "gloo"
    """Order in which reductions over ranks add: gloo's, or that of NCCL's ring or of a tree, see `ordered_sums`."""

    @classmethod
    def parse(cls, *, kernels: str, sums: str) -> Self:
        """Return the arithmetic that two options name. Raises UsageError for options that are unknown."""
        if kernels != "torch" and not (kernels.startswith(_OTHER) and kernels.removeprefix(_OTHER).isdecimal()):
            raise UsageError(f"--kernels {kernels}: write torch, or other:SEED with a number, such as other:1")
        if sums not in SUMS:
            raise UsageError(f"--sums {sums}: write {', '.join(SUMS[:-1])} or {SUMS[-1]}")
        return cls(kernels=kernels, sums=sums)

    @classmethod
    def here(cls) -> Self:
        """Return the arithmetic that the environment of this process asks for. Raises UsageError as `parse` does."""
        environment = os.environ
        return cls.parse(
            kernels=environment.get(KERNELS_VARIABLE, "torch"), sums=environment.get(SUMS_VARIABLE, "gloo")
        )

    @property
    def seed(self) -> int | None:
        """Seed of other kernels; None for torch's own."""
        return int(self.kernels.removeprefix(_OTHER)) if self.kernels.startswith(_OTHER) else None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of processes with this arithmetic."""
        return {KERNELS_VARIABLE: self.kernels, SUMS_VARIABLE: self.sums}


OWN = Arithmetic()
"""Arithmetic of the kernels of torch and the reductions of gloo."""
