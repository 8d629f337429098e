"""Scopes of laws: where each law holds, as its test declares it.

Declarations are read from the source of the tests, which import torch: a process that only plans does not.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from conformance.plan.cells import Cell
from conformance.plan.gaps import GAPS, Gap
from conformance.plan.selection import Facts, Selection, SelectionError, parse
from conformance.project import test_files
from reference_trainer.strict_yaml import allowed

_DECORATOR = "law"
_DECLARED = ("where", "gaps", "numbers", "of")
Trainers = Literal["reference trainer", "any trainer"]
"""Trainers that a law is about: the reference trainer, or the trainer that `conformance judge` is given."""


@dataclass(frozen=True)
class Scope:
    """Cells on which a law is judged."""

    law: str
    """Id such as `PAR-1`."""
    where: Selection
    """Cells of which the law's MUST speaks."""
    gaps: tuple[Gap, ...] = ()
    """Cells of which the MUST speaks and which the law cannot judge yet."""
    of: Trainers = "reference trainer"
    numbers: bool = False
    """True if the law judges the numbers that a run computes: gradients, norms, updates or bits of its state."""

    def holds(self, cell: Cell) -> bool:
        """Return whether the law is judged on the cell."""
        return self.judges(cell.facts())

    def judges(self, facts: Facts) -> bool:
        """Return whether the law is judged on a cell with these facts, which are computed once for many laws."""
        return self.where.holds(facts) and self._gap(facts) is None

    def gap(self, facts: Facts) -> Gap | None:
        """Return the first gap that leaves out a cell of which the MUST speaks; None if there is none."""
        return self._gap(facts) if self.where.holds(facts) else None

    def _gap(self, facts: Facts) -> Gap | None:
        return next((gap for gap in self.gaps if gap.selection.holds(facts)), None)


def scope(
    law: str, *, where: str, gaps: Sequence[str] = (), numbers: bool = False, of: Trainers = "reference trainer"
) -> Scope:
    """Return a scope; raises ValueError, with the law, for an expression that cannot be compiled and an unknown gap."""
    for name in gaps:
        if name not in GAPS:
            raise ValueError(f"law {law}: unknown gap `{name}`{allowed(name, GAPS)}")
    try:
        return Scope(law, parse(where), tuple(GAPS[name] for name in gaps), of, numbers)
    except SelectionError as error:
        raise ValueError(f"law {law}: {error}") from None


def in_order(law: str) -> tuple[bool, str, int]:
    """Return a key to sort laws by: preconditions come first, and `PAR-10` comes after `PAR-9`.

    Laws of any trainer, whose ids are words, come last, in the order in which they are declared. A case whose worker
    died before its law was known has the law `?`.
    """
    if not law[:1].isupper():
        return True, "~", 0
    family, _, number = law.partition("-")
    return family != "ENV", family, int(number)


@cache
def declared_scopes(directory: Path, *, of: Trainers = "reference trainer") -> dict[str, Scope]:
    """Return the scopes of the laws of these trainers that tests in a directory declare, by id of the law, in order.

    Raises ValueError for a law that is declared twice, or otherwise than by literals.
    """
    scopes: dict[str, Scope] = {}
    for file in test_files(directory):
        for call in _declarations(ast.parse(file.read_text())):
            declared = _scope_of(call, f"{file.name}:{call.lineno}")
            if declared.law in scopes:
                raise ValueError(f"{file.name}:{call.lineno}: law {declared.law} is declared twice")
            scopes[declared.law] = declared
    return {law: scopes[law] for law in sorted(scopes, key=in_order) if scopes[law].of == of}


def _declarations(module: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of the decorator `law`."""
    for function in (node for node in module.body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == _DECORATOR:
                yield decorator


def _scope_of(call: ast.Call, place: str) -> Scope:
    wanted = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in _DECLARED}
    try:
        law = ast.literal_eval(call.args[0])
        declared = {str(name): ast.literal_eval(value) for name, value in wanted.items()}
        where = declared.pop("where")
    except (IndexError, KeyError, ValueError):
        raise ValueError(f"{place}: write id, `where`, `gaps`, `numbers` and `of` of a law as literals") from None
    return scope(law, where=where, **declared)
