"""Laws: normative statements, each asserted by one test."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from conformance.plan.substrates import REAL, Substrate

_ATTRIBUTE = "conformance_law"
_Test = TypeVar("_Test", bound=Callable[..., None])


class Law(msgspec.Struct, frozen=True):
    """One normative statement about FSDP2 and tensor parallelism."""

    id: str
    """Family and number, such as `PAR-1`; docs/laws.md lists all."""
    must: str
    """Statement that MUST hold: first paragraph of the test's docstring."""
    reference: str
    """Address of torch's documentation, source or issue that promises it."""
    since: str
    """First torch version for which the law holds."""
    substrates: tuple[Substrate, ...]
    """Substrates on which the law can be judged."""


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
    """Return the law that a test function asserts, if any."""
    declared = getattr(test, _ATTRIBUTE, None)
    return declared if isinstance(declared, Law) else None


def in_order(law_id: str) -> tuple[str, int]:
    """Return a key to sort laws by: `PAR-10` comes after `PAR-9`.

    A case whose worker died before its law was known has the law `?`.
    """
    family, _, number = law_id.partition("-")
    return family, int(number or 0)
