"""Laws: normative statements, each asserted by one test."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from conformance.plan.scopes import Scope, Trainers, scope
from conformance.plan.substrates import REAL, Substrate

_ATTRIBUTE = "conformance_law"
_Test = TypeVar("_Test", bound=Callable[..., None])


class Law(msgspec.Struct, frozen=True):
    """One normative statement about FSDP2 and tensor parallelism."""

    id: str
    """Family and number, such as `PAR-1`, or words for a law of any trainer; see conformance/laws/README.md."""
    must: str
    """Statement that MUST hold: first paragraph of the test's docstring."""
    reference: str
    """Address of torch's documentation, source or issue that promises it."""
    since: str
    """First torch version for which the law holds."""
    substrates: tuple[Substrate, ...]
    """Substrates on which the law can be judged."""
    scope: Scope
    """Cells on which the law is judged."""
    memory: bool = False
    """True if the law measures the processor's memory, as torch's own kernels and gloo use it."""
    like: str = ""
    """Law of the reference trainer that a law of any trainer generalises; empty if there is none."""


def law(
    law_id: str,
    *,
    where: str,
    gaps: Sequence[str] = (),
    numbers: bool = False,
    own_run: bool = False,
    of: Trainers = "reference trainer",
    like: str = "",
    reference: str,
    since: str = "2.6",
    substrates: tuple[Substrate, ...] = REAL,
    memory: bool = False,
) -> Callable[[_Test], _Test]:
    """Declare that the decorated test asserts a law on all cells that `where` selects, except `gaps`.

    `where` is the scope of the MUST, in the language of `--cells`. `gaps` names cells of which the MUST speaks and
    that the law cannot judge yet, see `conformance.plan.scopes`. A law that judges the numbers of a run says
    `numbers=True`, one that needs a further run of each cell `own_run=True`, one that measures the processor's memory
    `memory=True`. A law `of="any trainer"` judges the evidence that `conformance judge` gathers of a trainer, and names
    the law of ours that it is `like`. Without `substrates` a law is judged on all real ones. The id, `where`, `gaps`,
    `numbers`, `own_run` and `of` are literals: `plan.scopes.declared_scopes` reads them without importing the test.
    Raises ValueError if the docstring does not state a MUST, for an expression that cannot be compiled, and for an
    unknown gap.
    """
    holds = scope(law_id, where=where, gaps=gaps, numbers=numbers, own_run=own_run, of=of)

    def declare(test: _Test) -> _Test:
        must = " ".join((test.__doc__ or "").strip().split("\n\n")[0].split())
        if "MUST" not in must:
            raise ValueError(
                f"law {law_id}: the first paragraph of {test.__name__}'s docstring must say what MUST hold"
            )
        setattr(test, _ATTRIBUTE, Law(law_id, must, reference, since, substrates, holds, memory, like))
        return test

    return declare


def law_of(test: Any) -> Law | None:
    """Return the law that a test function asserts, if any."""
    declared = getattr(test, _ATTRIBUTE, None)
    return declared if isinstance(declared, Law) else None
