"""Small faults of Python code: the points of a module where a fault fits, and the module with one of these faults.

A fault replaces a comparison, logical or arithmetic operator, negates a condition, leaves out a call whose result is
not used, drops the last iteration of a loop, adds one to an integer, or inverts a bool. Checks that only raise, log
messages, and defaults of arguments stay as they are.
"""

import ast
import bisect
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

_REPLACED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_ONLY_SAY = ("log", "warn", "_raise", "torch._C._log", "torch._check", "super().__init__")
_SHOWN = 60
_Node = TypeVar("_Node", bound=ast.AST)


class Point(NamedTuple):
    """Point in a module where a fault fits; numbers count within the module."""

    number: int
    line: int
    function: str
    change: str


def points(source: str, *, in_judgement: bool = False) -> list[Point]:
    """Return all points of a module; `in_judgement` adds checks that raise, returned values and floats."""
    mutator = _mutator(None, in_judgement)
    mutator.visit(ast.parse(source))
    return mutator.points


def mutated(source: str, number: int, *, in_judgement: bool = False) -> ast.Module:
    """Return the module with the fault of this number among its points."""
    return _finished(_mutator(number, in_judgement).visit(ast.parse(source)))


def statement_at(source: str, line: int) -> int:
    """Return the first line of the innermost statement that contains a line."""
    lines = _statements(source)
    return lines[bisect.bisect(lines, line) - 1]


@lru_cache(maxsize=1)
def _statements(source: str) -> list[int]:
    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))


def _finished(tree: ast.Module) -> ast.Module:
    return ast.fix_missing_locations(tree)


class _Mutator(ast.NodeTransformer):
    def __init__(self, wanted: int | None) -> None:
        self.points: list[Point] = []
        self._wanted = wanted
        self._functions: list[str] = []

    def _is_wanted(self, node: ast.expr | ast.stmt, change: str) -> bool:
        point = Point(len(self.points), node.lineno, ".".join(self._functions), change)
        self.points.append(point)
        return point.number == self._wanted

    def _visit_body(self, node: Any) -> Any:
        self._functions.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._functions.pop()
        return node

    visit_FunctionDef = visit_ClassDef = _visit_body

    def _leave(self, node: _Node) -> _Node:
        return node

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _leave

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        text = ast.unparse(node.value)
        if not isinstance(node.value, ast.Call) or text.startswith(_ONLY_SAY):
            return node
        if self._functions and self._is_wanted(node, f"without {text[:_SHOWN]}"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if all(isinstance(statement, ast.Raise) for statement in node.body):
            return node
        simple = not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp)
        if simple and self._is_wanted(node, f"not {ast.unparse(node.test)[:_SHOWN]}"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        iterated = ast.unparse(node.iter)
        if self._is_wanted(node, f"all but the last of {iterated[:_SHOWN]}"):
            node.iter = ast.parse(f"list({iterated})[:-1]", mode="eval").body
            return node
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not) and self._is_wanted(node, f"without not: {ast.unparse(node)[:_SHOWN]}"):
            return node.operand
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1:
            node.ops = [self._replaced(node, node.ops[0])]
        return self.generic_visit(node)

    def _visit_operator(self, node: Any) -> ast.AST:
        node.op = self._replaced(node, node.op)
        return self.generic_visit(node)

    visit_BoolOp = visit_BinOp = visit_AugAssign = _visit_operator

    def _replaced(self, node: ast.expr | ast.stmt, operator: Any) -> Any:
        other = _REPLACED.get(type(operator))
        if other is None or not self._is_wanted(node, f"{other.__name__} in {ast.unparse(node)[:_SHOWN]}"):
            return operator
        return other()

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, int):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            if self._is_wanted(node, f"{other} for {node.value}"):
                return ast.copy_location(ast.Constant(other), node)
        return node


class _JudgementMutator(_Mutator):
    def visit_If(self, node: ast.If) -> ast.AST:
        test = ast.unparse(node.test)
        if test == "TYPE_CHECKING":
            return node
        if self._is_wanted(node, f"not ({test[:_SHOWN]})"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None and self._is_wanted(node, f"None for {ast.unparse(node.value)[:_SHOWN]}"):
            node.value = ast.Constant(None)
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, float) and self._is_wanted(node, f"{node.value + 1} for {node.value}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return super().visit_Constant(node)


def _mutator(wanted: int | None, in_judgement: bool) -> _Mutator:
    return (_JudgementMutator if in_judgement else _Mutator)(wanted)
