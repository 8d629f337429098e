"""Source files as the rules on quality read them: each kind of import, docstring, name and cycle is seen."""

import ast

from tests.support.source_code import Import, cycle, docstrings, identifiers, imports, private_names, words


def test_imports_are_seen_everywhere() -> None:
    program = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c import d
def f():
    import e
"""
    assert sorted(imports(ast.parse(program))) == [
        Import("a.b", "a.b", typing_only=False),
        Import("c", "c.d", typing_only=True),
        Import("e", "e", typing_only=False),
        Import("typing", "typing.TYPE_CHECKING", typing_only=False),
    ]


def test_private_names_are_seen() -> None:
    program = """
import pytest
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as hidden
from torch.distributed.tensor import DTensor
def f(self, func):
    "torch._C is only mentioned here"
    dist._x(torch._C.y, DTensor._op, self._own, func.__name__, torch.__version__)
    from _pytest.config import Config
    return getattr("torch.distributed._fsdp", pytest.Item._x)
"""
    module = ast.parse(program)
    assert private_names(module, "torch") == {
        "torch.utils._python_dispatch",
        "torch.distributed._x",
        "torch._C",
        "torch._C.y",
        "torch.distributed.tensor.DTensor._op",
        "torch.distributed._fsdp",
    }
    assert private_names(module, "pytest") == {"_pytest.config", "_pytest.config.Config", "pytest.Item._x"}


def test_docstrings_of_all_kinds_are_seen() -> None:
    program = '''"""Module."""
X = 1
"""Attribute."""
class C:
    """Class."""
    y: int
    """Field."""
    def f(self):
        """Function."""
        "no docstring"
'''
    assert sorted(text for _, text in docstrings(ast.parse(program))) == sorted(
        ["Module.", "Attribute.", "Class.", "Field.", "Function."]
    )


def test_identifiers_of_all_kinds_are_seen() -> None:
    program = "from m import n as o\nclass C:\n    def f(self, a, *, b=1):\n        self.x = g(k=a)\n"
    names = {name for _, name in identifiers(ast.parse(program))}
    assert names == {"o", "C", "f", "self", "a", "b", "x", "g", "k"}


def test_words_of_identifiers() -> None:
    assert words("_RankFiles2_asHTML") == ["rank", "files", "2", "as", "html"]
    assert words("IDLE_LIMIT_S") == ["idle", "limit", "s"]


def test_cycles_are_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}}) == []
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
