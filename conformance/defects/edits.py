"""Faults that are edits of source code, of torch or of the trainer: the rows of edits.yaml, and their application."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from conformance.defects.injection import Defect, NotInjectable, replaced
from conformance.plan.substrates import REAL, Substrate
from reference_trainer.strict_yaml import convert, load

FILE = Path(__file__).with_name("edits.yaml")


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replacement of a text in the source of a function or of a module."""

    target: str
    """`package.module`, `package.module:function` or `package.module:Class.method`."""
    old: str
    """Text of the source; further lines of it have the indentation of the source."""
    new: str = "pass"
    twin: str | None = None
    """Text of the benign twin; None for a statement `old`, which the twin executes twice."""
    count: int = 1
    """Number of times that `old` occurs in the source of the target."""

    def applied(self, source: str, *, benign: bool = False) -> str:
        """Return the source with `new`, or with the text of the twin, in each place of `old`.

        Raises NotInjectable unless `old` occurs `count` times.
        """
        found = source.count(self.old)
        if found != self.count:
            raise NotInjectable(f"{self.target} has this {found} times and not {self.count}: {self.old}")
        if benign and self.twin is None:
            statement = re.compile(rf"^( *){re.escape(self.old)}", re.MULTILINE)
            return statement.sub(lambda match: f"{match[0]}\n{match[0]}", source)
        return source.replace(self.old, self.twin if benign and self.twin is not None else self.new)


class EditedDefect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of edits.yaml: the fields of a Defect, and its edits."""

    why: str
    laws: tuple[str, ...]
    cells: str
    source: str
    edits: tuple[Edit, ...]
    subjects: tuple[str, ...] = ()
    substrates: tuple[Substrate, ...] = REAL
    since: str = "2.6"


@cache
def rows(file: Path = FILE) -> dict[str, EditedDefect]:
    """Return the rows by id, without torch. Raises ConfigError for a row that is not as documented."""
    return convert(load(file), dict[str, EditedDefect])


def edited_defects() -> tuple[Defect, ...]:
    """Return the defects of edits.yaml in its order."""
    return tuple(
        Defect(
            id=name,
            why=row.why,
            source=row.source,
            laws=row.laws,
            cells=row.cells,
            inject=partial(edited, row.edits),
            subjects=row.subjects,
            substrates=row.substrates,
            since=row.since,
        )
        for name, row in rows().items()
    )


@contextmanager
def edited(edits: Sequence[Edit], benign: bool) -> Iterator[None]:
    """Replace the functions that the edits name by functions with the edited source, or with that of the twin.

    Raises NotInjectable if there is no such function, or if its source has not the text of the edit.
    """
    with ExitStack() as stack:
        for edit in edits:
            owner, name = re.split(r"[.:](?=\w+$)", edit.target)
            stack.enter_context(replaced(owner, name, partial(_recompiled, edit, benign)))
        yield


def _recompiled(edit: Edit, benign: bool, original: Any) -> Callable[..., Any]:
    """Return a function with the edited source; lines before the edit have the numbers of torch's file."""
    function = inspect.unwrap(original)
    lines, first_line = inspect.getsourcelines(function)
    source = textwrap.dedent(edit.applied("".join(lines), benign=benign))
    code = compile("\n" * (first_line - 1) + source, function.__code__.co_filename, "exec")
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    return namespace[function.__name__]  # type: ignore[no-any-return]
