"""Faults that are one statement of torch's own source: left out, or replaced, in a function that is compiled again.

A statement is found by its code, so that a version of torch that has written it otherwise is noticed.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from conformance.defects.injection import NotInjectable, replaced


def edited(owner: str, name: str, statement: str, *, into: Sequence[str]) -> AbstractContextManager[None]:
    """Replace a statement, wherever it stands in the function `name` of `owner`, by others.

    `owner` is `package.module` or `package.module:Class`; line numbers stay those of the source. Raises NotInjectable
    if there is no such function, or no such statement in it. Without other statements this one is left out.
    """

    def make(original: Any) -> Callable[..., Any]:
        function = inspect.unwrap(original)
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        editor = _Editor(statement, into)
        edited_tree = ast.increment_lineno(editor.visit(tree), first_line - 1)
        if not editor.found:
            raise NotInjectable(f"{owner} {name} has no statement {statement}")
        namespace: dict[str, Any] = {}
        exec(compile(edited_tree, function.__code__.co_filename, "exec"), function.__globals__, namespace)
        return namespace[name]  # type: ignore[no-any-return]

    return replaced(owner, name, make)


class _Editor(ast.NodeTransformer):
    def __init__(self, statement: str, into: Sequence[str]) -> None:
        self._code = ast.unparse(ast.parse(statement))
        self._into = into or ("pass",)
        self.found = False

    def generic_visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt) or ast.unparse(node) != self._code:
            return super().generic_visit(node)
        self.found = True
        replacements = [new for text in self._into for new in ast.parse(text).body]
        return [_at(node, new) for new in replacements]


def _at(original: ast.stmt, new: ast.stmt) -> ast.stmt:
    """Return the new statement with all of its nodes on the line of the original."""
    for node in ast.walk(new):
        if isinstance(node, ast.stmt | ast.expr | ast.keyword):
            ast.copy_location(node, original)
    return new
