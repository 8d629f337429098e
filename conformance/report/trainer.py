"""Another trainer in a report: its packages, the dtypes and reductions of its runs, and the faults that laws see."""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

Ingredient = Literal["loop", "sync", "scaling", "clip", "optimizer"]
"""Ingredient of a step that either the owner or the suite supplies: the loop over micro-batches, the moments at which
gradients are reduced, the division of losses by their number, clipping, and the optimizer."""
INGREDIENTS: tuple[Ingredient, ...] = get_args(Ingredient)
_ALWAYS_OWN = ("parallelize", "loss", "data")


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dtypes and reductions that were measured on a cell, and the dtype of the reference."""

    cell: str
    matmul_dtypes: list[str]
    gradient_dtypes: list[str]
    reductions: list[str]
    reference_dtype: str
    by_suite: list[Ingredient] | None = None
    """Ingredients of the steps that the suite has supplied; the owner has supplied the others, parallelisation, model,
    loss and data. None in older reports."""

    def __str__(self) -> str:
        """Return the policy in words."""
        products, gradients = "/".join(self.matmul_dtypes), "/".join(self.gradient_dtypes)
        return (
            f"products in {products or 'nothing'}, gradients {gradients or 'none'}, reduced by "
            f"{', '.join(self.reductions) or 'nothing'}; compared with one process in {self.reference_dtype}"
        )


class FaultSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault that was injected into the trainer's steps on a cell, and the laws that see it."""

    fault: str
    cell: str
    laws: list[str]
    """Laws that hold without the fault and fail with it."""


class TrainerFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the trainer that a session has judged."""

    name: str
    given: str
    """Trainer as the user has named it."""
    versions: dict[str, str]
    """Version by package."""
    shims: list[str]
    """Private names that the adapter has touched."""
    policies: list[RunPolicy]
    faults: list[FaultSeen]
    """Empty if no fault was tried."""
    notes: list[str] = []
    """Sentences about a loss that is unusual and was judged."""

    @property
    def blind_to(self) -> list[str]:
        """Faults that no law sees, each with its cell."""
        return [f"{seen.fault} on {seen.cell}" for seen in self.faults if not seen.laws]


def judged_line(trainer: TrainerFacts) -> str:
    """Return the clause with the owner's ingredients, which are judged, and those of the suite in any run.

    It is empty if no run has ended.
    """
    known = [policy.by_suite for policy in trainer.policies if policy.by_suite is not None]
    if not known:
        return ""
    by_suite = [each for each in INGREDIENTS if any(each in supplied for supplied in known)]
    own = [*_ALWAYS_OWN, *(each for each in INGREDIENTS if each not in by_suite)]
    return f"{', '.join(own)}; " + (f"the suite's: {', '.join(by_suite)}" if by_suite else "all the owner's")


def trainer_lines(trainer: TrainerFacts) -> Iterator[str]:
    """Yield a line about the packages, one for each policy and for each fault, and whether verdicts count."""
    yield f"{trainer.name}: {', '.join(f'{name} {version}' for name, version in trainer.versions.items())}"
    if trainer.shims:
        yield f"shims (private names): {', '.join(trainer.shims)}"
    yield from (f"note: {note}" for note in trainer.notes)
    for text, cells in _grouped((str(policy), policy.cell) for policy in trainer.policies).items():
        yield f"measured: {', '.join(cells)}: {text}"
    seen = ((f"{seen.fault}: {', '.join(seen.laws) or 'NO LAW SEES IT'}", seen.cell) for seen in trainer.faults)
    for text, cells in _grouped(seen).items():
        yield f"fault {text} ({', '.join(cells)})"
    if not trainer.faults:
        yield "faults: not tried, so nothing says that the laws see this trainer"
    if trainer.blind_to:
        yield f"blind to {', '.join(trainer.blind_to)}: these verdicts do not count"


def _grouped(entries: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the cells of each text, in the order of their first occurrence."""
    groups: dict[str, list[str]] = {}
    for text, cell in entries:
        groups.setdefault(text, []).append(cell)
    return groups
