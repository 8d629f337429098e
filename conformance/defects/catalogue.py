"""Catalogue of all defects by id, and its rows as source.

`--defect ID` injects a defect, `--defect ID.twin` its benign twin, `--defect A+B` both A and B, A first, and
`--defect FILE.py:NAME` a user's own. Processes without torch read the sources of the modules of faults: laws, cells
and `hangs` of a `@defect(...)` are literals, or constants of the module that are.
"""

import ast
import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from conformance.defects import edits
from conformance.defects.edits import edited_defects
from conformance.defects.injection import Defect, Injection, NotInjectable, from_file
from reference_trainer.checks import UsageError

TWIN, AND = ".twin", "+"


def ids() -> tuple[str, ...]:
    """Return the ids of all defects and of their twins."""
    return tuple(name for defect in defects() for name in (defect.id, defect.id + TWIN))


def is_known(name: str) -> bool:
    """Return whether the catalogue has all ids that `name` joins."""
    return set(_names(name)) <= set(ids())


def _names(name: str | None) -> list[str]:
    if name is None:
        return []
    return [name] if ":" in name else name.split(AND)


def require_known(name: str) -> str:
    """Return the name in a form that ranks can resolve from any working directory.

    Raises UsageError for a name that `injected` cannot inject.
    """
    if ":" in name:
        path, _, attribute = name.rpartition(":")
        name = f"{Path(path).resolve()}:{attribute}"
        from_file(name.removesuffix(TWIN))
    elif not is_known(name):
        near = difflib.get_close_matches(name, ids(), n=1)
        meant = f" (did you mean `{near[0]}`?)" if near else ""
        raise UsageError(
            f"--defect {name}: not a known defect, nor FILE.py:NAME for your own{meant}; `conformance laws` names all"
        )
    return name


@contextmanager
def injected(name: str | None) -> Iterator[None]:
    """Inject all defects or twins that `name` joins, or that of `FILE.py:NAME`; None changes nothing.

    Raises NotInjectable if a defect cannot be injected, so that a mistake in the defect is not taken for a fault of the
    product. `require_known` says which names are allowed.
    """
    with ExitStack() as stack:
        for defect_name in _names(name):
            try:
                stack.enter_context(_injection(defect_name))
            except Exception as error:
                raise NotInjectable(f"{defect_name} cannot be injected: {type(error).__name__}: {error}") from error
        yield


def subjects_of(name: str | None) -> frozenset[str]:
    """Return the only subjects that sweeps try with these defects or twins; empty for all, see `Defect.subjects`."""
    faults = [_fault(each) for each in _names(name)]
    return frozenset(subject for fault in faults if isinstance(fault, Defect) for subject in fault.subjects)


def _injection(name: str) -> Injection:
    fault = _fault(name)
    if isinstance(fault, Defect):
        return fault.inject(name.endswith(TWIN))
    return cast("Callable[[], Injection]", fault)()


def _fault(name: str) -> object:
    base = name.removesuffix(TWIN)
    return from_file(base) if ":" in base else {defect.id: defect for defect in defects()}[base]


@cache
def defects() -> tuple[Defect, ...]:
    """Return the catalogue: the defects of each module of faults, then those of edits.yaml, in their order."""
    # Imported only when asked for because they import torch, which the controller does without.
    modules = [importlib.import_module(f"{__package__}.{file.stem}") for file in fault_files()]
    written = (value for module in modules for value in vars(module).values() if isinstance(value, Defect))
    return (*written, *edited_defects())


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
    """Return the files of all modules of faults; with edits.yaml they make up the catalogue."""
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
