"""Signatures of known defects, for processes that never import torch: which laws fail on which cells.

Modules of faults import torch, so their sources are read instead: id, laws, cells and `hangs` of a `Defect` are
literals, or constants of the module that are.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeGuard

import msgspec


class Signature(msgspec.Struct, frozen=True):
    """Verdicts by which a defect shows, see `injection.Defect`."""

    id: str
    laws: tuple[str, ...]
    """Ids of the laws that must fail."""
    cells: str = ""
    """Selection of the cells on which they must; empty if only a device shows the defect."""
    hangs: bool = False
    """True if the verdict is `timeout` instead of `fail`."""


def fault_files() -> list[Path]:
    """Return the files of all modules of faults, whose defects make up the catalogue."""
    return sorted(Path(__file__).parent.glob("*_faults.py"))


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the signatures of all defects of the catalogue, by module."""
    return tuple(signature for file in fault_files() for signature in _signatures_of(ast.parse(file.read_text())))


def _signatures_of(module: ast.Module) -> list[Signature]:
    assigned = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [_signature(value, assigned) for value in assigned.values() if _is_defect(value)]


def _is_defect(value: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Defect"


def _signature(defect: ast.Call, assigned: Mapping[str, ast.expr]) -> Signature:
    """Return the signature of a `Defect(...)`. Raises ValueError if a field is neither a literal nor a constant."""
    values = {keyword.arg: keyword.value for keyword in defect.keywords if keyword.arg in Signature.__struct_fields__}
    literals = {name: assigned[value.id] if isinstance(value, ast.Name) else value for name, value in values.items()}
    return msgspec.convert({name: ast.literal_eval(literal) for name, literal in literals.items()}, Signature)
