"""Declaration of laws for subjects: an id in words, the law of the suite that it generalises, and cells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.subjects.cells import SubjectCell
from conformance.subjects.evidence import Evidence

Test = Callable[[Evidence], None]


@dataclass(frozen=True)
class SubjectLaw:
    """Statement that MUST hold for every subject on some cells."""

    id: str
    suite_law: str
    """Law of the suite, about the reference trainer, whose relation this one is; empty if there is none."""
    must: str
    where: Callable[[SubjectCell], bool]
    test: Test


SUBJECT_LAWS: list[SubjectLaw] = []
"""Laws that were declared so far; `catalogue.LAWS` has all."""


def everywhere(_cell: SubjectCell) -> bool:
    """Select all cells."""
    return True


def in_fp32(cell: SubjectCell) -> bool:
    """Select cells in fp32."""
    return cell.precision == "fp32"


def in_bf16(cell: SubjectCell) -> bool:
    """Select cells in mixed precision."""
    return cell.precision == "bf16"


def subject_law(
    law_id: str, *, suite_law: str = "", where: Callable[[SubjectCell], bool] = everywhere
) -> Callable[[Test], Any]:
    """Declare that the decorated function asserts a law on the cells that `where` selects.

    Raises ValueError if the docstring does not say what MUST hold.
    """

    def declare(test: Test) -> Test:
        must = " ".join((test.__doc__ or "").strip().split("\n\n")[0].split())
        if "MUST" not in must:
            raise ValueError(f"law {law_id}: the first paragraph of its docstring must say what MUST hold")
        SUBJECT_LAWS.append(SubjectLaw(law_id, suite_law, must, where, test))
        return test

    return declare
