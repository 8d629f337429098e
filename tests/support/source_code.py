"""Source files of the project as the rules of `test_quality` read them: imports, docstrings and identifiers."""

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from conformance.project import PROJECT


class Import(NamedTuple):
    """Import of a module, or of a name in it."""

    module: str
    name: str
    """Dotted name of the import: the module, or `module.name`, which may be a module too."""
    typing_only: bool
    """True below `if TYPE_CHECKING`."""


def files(*directories: str) -> list[str]:
    """Return the paths of all Python files below directories of the project, relative to the project."""
    paths = [file for directory in directories for file in (PROJECT / directory).rglob("*.py")]
    return sorted(str(path.relative_to(PROJECT)) for path in paths)


@cache
def tree(file: str) -> ast.Module:
    """Return the syntax tree of a file of the project."""
    return ast.parse((PROJECT / file).read_text(), filename=file)


@cache
def imports(module: ast.Module) -> tuple[Import, ...]:
    """Return every import of a module, wherever in the module."""
    return tuple(_imports(module))


def _imports(module: ast.Module) -> Iterator[Import]:
    guards = [node for node in ast.walk(module) if isinstance(node, ast.If) and _is_type_checking(node.test)]
    guarded = {id(inner) for guard in guards for statement in guard.body for inner in ast.walk(statement)}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, alias.name, id(node) in guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            origin = str(node.module)
            yield from (Import(origin, f"{origin}.{alias.name}", id(node) in guarded) for alias in node.names)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@cache
def modules() -> Mapping[str, str]:
    """Return the files of all modules of `conformance` and `reference_trainer` by dotted name."""
    paths = files("conformance", "reference_trainer")
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}


@cache
def imported_modules(file: str, *, typing_too: bool) -> Set[str]:
    """Return the modules of the project that a file imports."""
    found = (imported for imported in imports(tree(file)) if typing_too or not imported.typing_only)
    names = {imported.name if imported.name in modules() else imported.module for imported in found}
    return names & modules().keys()


def cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return the nodes of a cycle, of which the first is also the last, or an empty list if the graph has no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        nodes: list[str] = error.args[1]
        return nodes
    return []


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of all docstrings: of modules, classes and functions, and below assignments."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if not isinstance(body, list):  # that of a lambda is an expression
            continue
        owned = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for index, statement in enumerate(body):
            documents = owned if index == 0 else isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
            match statement:
                case ast.Expr(ast.Constant(str(text))) if documents:
                    yield statement.lineno, text.strip()


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of all variables, functions, classes, attributes, arguments and imported modules."""
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name, asname=asname):
                yield node.lineno, asname or name.rpartition(".")[2]
            case ast.keyword(arg=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def words(identifier: str) -> list[str]:
    """Return the words of an identifier in lower case, split at underscores and at changes of case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", identifier)]


def private_names(module: ast.Module, library: str) -> set[str]:
    """Return private names below a library: imported, as an attribute, or as a string.

    The last segment, or a segment before it, begins with a single underscore.
    """
    private = re.compile(rf"{library}(\.\w+)*\._(?!_)\w+(\.\w+)*|_{library}(\.\w+)*")
    roots = {library: library}
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            roots.update({alias.asname or alias.name: origin + alias.name for alias in node.names})
    names = {name for imported in imports(module) for name in (imported.module, imported.name)}
    names |= {_dotted(node, roots) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    names |= {str(node.value) for node in ast.walk(module) if isinstance(node, ast.Constant)}
    return {name for name in names if private.fullmatch(name)}


def _dotted(node: ast.expr, roots: dict[str, str]) -> str:
    """Return `torch.distributed._x` for `dist._x` if `dist` was imported so; "" for other expressions."""
    match node:
        case ast.Name():
            return roots.get(node.id, "")
        case ast.Attribute():
            return f"{_dotted(node.value, roots)}.{node.attr}"
        case _:
            return ""
