"""Laws: normative statements, each asserted by one test."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from conformance.plan.cells import Cell
from conformance.plan.substrates import REAL, Substrate
from conformance.run.record import Record


class Run(Protocol):
    """The fixture `run`: the record of a cell, run at most once per session (`repeat=1`: a second time)."""

    def __call__(self, cell: Cell, *, repeat: int = 0) -> Record: ...


class Probe(Protocol):
    """The fixture `probe`: what each rank of a world finds in its surroundings."""

    def __call__(self, world_size: int) -> list[dict[str, Any]]: ...


class Measure(Protocol):
    """The fixture `measure`: what a task, `MODULE:FUNCTION` of the experiments, measures on each rank of a cell's
    world; or in one process, `alone`, which may simulate that world, on the CPU or `on_device`."""

    def __call__(self, task: str, cell: Cell, *, alone: bool = False, on_device: bool = False) -> list[Any]: ...


_ATTRIBUTE = "conformance_law"
_Test = TypeVar("_Test", bound=Callable[..., None])


class Law(msgspec.Struct, frozen=True):
    """One normative statement about FSDP2 and tensor parallelism."""

    id: str
    """Such as `PAR-1`; families are listed in DESIGN section 5."""
    must: str
    """The statement: first paragraph of the test's docstring."""
    reference: str
    """Where torch promises it."""
    since: str
    """First torch version for which it holds."""
    substrates: tuple[Substrate, ...]


def law(
    law_id: str, *, reference: str, since: str = "2.6", substrates: tuple[Substrate, ...] = REAL
) -> Callable[[_Test], _Test]:
    """Declare that the decorated test asserts a law. Raises ValueError if its docstring does not state a MUST."""

    def declare(test: _Test) -> _Test:
        must = " ".join((test.__doc__ or "").strip().split("\n\n")[0].split())
        if "MUST" not in must:
            raise ValueError(
                f"law {law_id}: the first paragraph of {test.__name__}'s docstring must say what MUST hold"
            )
        setattr(test, _ATTRIBUTE, Law(law_id, must, reference, since, substrates))
        return test

    return declare


def law_of(test: Any) -> Law | None:
    """The law that a test function asserts."""
    found = getattr(test, _ATTRIBUTE, None)
    return found if isinstance(found, Law) else None


def in_order(law_id: str) -> tuple[str, int]:
    """A key to sort laws by: `PAR-10` comes after `PAR-9`. What lost its worker before it was known, has `?`."""
    family, _, number = law_id.partition("-")
    return family, int(number or 0)
