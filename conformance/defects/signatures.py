"""Rows of the catalogue as source, for processes that never import torch: which laws fail on which cells.

Modules of faults import torch, so that their sources are read instead: laws, cells and `hangs` of a `@defect(...)` are
literals, or constants of the module that are.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance.defects import edits

HERE = Path(__file__).parent


class Signature(msgspec.Struct, frozen=True):
    """Verdicts by which a defect shows, see `injection.Defect`."""

    id: str
    laws: tuple[str, ...]
    """Ids of the laws that must fail."""
    cells: str = ""
    """Selection of the cells on which they must; empty if only a device shows the defect."""
    hangs: bool = False
    """True if the verdict is `timeout` instead of `fail`."""


class Row(NamedTuple):
    """Defect of a module of faults, as its source."""

    signature: Signature
    text: str


class FaultModule(NamedTuple):
    """Source of a module of faults."""

    rows: list[Row]
    shared: str
    """Text of all statements that are no defect."""
    imports: set[str]
    """Stems of the modules of faults from which it imports."""


def fault_files(folder: Path = HERE) -> list[Path]:
    """Return the files of all modules of faults; with torch_edits.yaml they make up the catalogue."""
    return sorted(folder.glob("*_faults.py"))


@cache
def signatures() -> tuple[Signature, ...]:
    """Return the signatures of all defects in the order of the catalogue."""
    written = [row.signature for file in fault_files() for row in fault_module(file.read_text()).rows]
    return (*written, *(Signature(name, row.laws, row.cells) for name, row in edits.rows().items()))


@cache
def definitions(folder: Path = HERE) -> dict[str, str]:
    """Return the text that decides the effect of each defect, by id.

    That is its row, and its module and those from which this imports, without their other defects. The folder may be
    that of another commit.
    """
    modules = {file.stem: fault_module(file.read_text()) for file in fault_files(folder)}

    def shared(stem: str) -> str:
        return "".join([modules[stem].shared, *(shared(each) for each in sorted(modules[stem].imports))])

    written = {row.signature.id: row.text + shared(stem) for stem, module in modules.items() for row in module.rows}
    file = folder / edits.FILE.name
    edited = (
        {name: msgspec.json.encode(row).decode() for name, row in edits.rows(file).items()} if file.exists() else {}
    )
    return written | edited


def fault_module(source: str) -> FaultModule:
    """Return the defects of a module of faults, and the rest of it.

    Raises ValueError if laws, cells or `hangs` of a defect are neither literals nor constants of the module.
    """
    module = ast.parse(source)
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    rows, shared, imports = [], [], set()
    for node in module.body:
        text = ast.unparse(node)
        call = _declaration(node)
        if call is not None and isinstance(node, ast.FunctionDef):
            rows.append(Row(_signature(node.name, call, constants), text))
        else:
            shared.append(text)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.endswith("_faults"):
            imports.add(node.module.rpartition(".")[2])
    return FaultModule(rows, "\n".join(shared), imports)


def _declaration(node: ast.stmt) -> ast.Call | None:
    """Return the call `defect(...)` that decorates a function, or None."""
    for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "defect":
            return decorator
    return None


def _signature(name: str, call: ast.Call, constants: Mapping[str, ast.expr]) -> Signature:
    laws, cells, _ = call.args
    hangs = [keyword.value for keyword in call.keywords if keyword.arg == "hangs"]
    values = [ast.literal_eval(constants[v.id] if isinstance(v, ast.Name) else v) for v in (laws, cells, *hangs)]
    return Signature(name.replace("_", "-"), tuple(values[0].split()), *values[1:])
