"""Table of the trainers of other people that were judged by the documentation: lines and minutes, then and now.

Lines are counted in the shipped adapters, durations of `pip install` come from docs/measured.json, which `python -m
benchmarks.clients` writes, verdicts and their durations from docs/subjects.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from conformance.project import PACKAGE

FIRST_TRIALS: Mapping[str, tuple[int, int]] = {
    "pytorch-examples-fsdp2": (33, 3),
    "pytorch-examples-tp": (58, 7),
    "olmo-core": (98, 8),
    "diffusers": (30, 2),
    "timm": (26, 2),
    "verl": (42, 3),
    "nemo-automodel": (85, 6),
    "nemo-automodel-experts": (93, 18),
}
"""Lines that a person wrote in the first trial of each client, and minutes until the first verdict."""
_HEADERS = ("client", "lines at first", "lines now", "imports", "minutes at first", "`pip install`", "`judge`", "fails")
_INTRODUCTION = """Clients of the first trials, judged again. Lines at first are those that a person wrote, and
minutes those until the first verdict. Lines now are those of the shipped adapter without blanks,
comments and docstrings, imports included; `pip install` has torch, the suite and the client's
packages in a new environment, `judge` tries all cells and faults.

"""
_SHIPPED = PACKAGE / "subjects" / "shipped"


def table(
    *, failing: Mapping[str, Sequence[str]], judging_s: Mapping[str, float], installing_s: Mapping[str, float]
) -> str:
    """Return a Markdown table of the clients of the first trials that were judged again, with laws that each fails."""
    rows = [
        [
            name,
            lines,
            *needed_lines(_SHIPPED / f"{_file(name)}.py", name.replace("-", "_")),
            minutes,
            _minutes(installing_s.get(name)),
            _minutes(judging_s[name]),
            ", ".join(f"`{law}`" for law in failing[name]) or "conformant",
        ]
        for name, (lines, minutes) in FIRST_TRIALS.items()
        if name in failing
    ]
    return _INTRODUCTION + tabulate(rows, headers=_HEADERS, tablefmt="github")


def _file(name: str) -> str:
    """Return the name of the shipped module that has a client."""
    words = name.split("-")
    candidates = ["_".join(words[:end]) for end in range(len(words), 0, -1)]
    return next(candidate for candidate in candidates if (_SHIPPED / f"{candidate}.py").exists())


def _minutes(duration_s: float | None) -> str:
    return "not measured" if duration_s is None else f"{duration_s / 60:.1f} min"


def needed_lines(file: Path, name: str) -> tuple[int, int]:
    """Return the number of lines of a module that one of its functions needs, and how many of these are imports.

    Blanks, comments and docstrings do not count.
    """
    text = file.read_text()
    statements = [each for each in ast.parse(text).body if not _is_text(each)]
    makers = {made: each for each in statements for made in _made(each)}
    needed, waiting = list[ast.stmt](), [makers[name], *(each for each in statements if isinstance(each, ast.Expr))]
    while waiting:
        statement = waiting.pop()
        if statement not in needed:
            needed.append(statement)
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            waiting += [makers[each] for each in used if each in makers]
    imports = [each for each in needed if isinstance(each, ast.Import | ast.ImportFrom)]
    return _count(needed, text), _count(imports, text)


def _count(statements: Sequence[ast.stmt], text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    numbers = {number for statement in statements for number in _numbers(statement)}
    return sum(lines[number - 1] != "" and not lines[number - 1].startswith("#") for number in numbers)


def _made(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module makes."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
        case ast.Assign() | ast.AnnAssign():
            yield from (each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and _is_stored(each))
        case _:
            pass


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _numbers(statement: ast.stmt) -> set[int]:
    """Return the numbers of a statement's lines, decorators included, without those of texts that document it."""
    decorators = [each.lineno for each in getattr(statement, "decorator_list", ())]
    documentation = [each for each in ast.walk(statement) if isinstance(each, ast.stmt) and _is_text(each)]
    documented = {number for each in documentation for number in range(each.lineno, (each.end_lineno or 0) + 1)}
    return {*range(min([statement.lineno, *decorators]), (statement.end_lineno or 0) + 1)} - documented
