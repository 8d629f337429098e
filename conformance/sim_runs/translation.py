"""Translation of a program for CUDA into one for the simulated device, when its modules are imported.

Names of the device change, in strings as well as in attributes: `"cuda:0"`, `torch.cuda`, `tensor.cuda()`, `is_cuda`
and the backend `nccl`. A program that takes any accelerator has none of these names and runs as it is.
"""

import ast
import re
import sys
from collections.abc import Collection, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from conformance.sim.device import BACKEND, BACKENDS, NAME

_STRINGS = (
    (re.compile(r"(?<![\w-])cuda(?![\w-])"), NAME),
    (re.compile(r"(?<![\w-])nccl(?![\w-])"), BACKEND),
    (re.compile(r"\bcpu:gloo\b"), f"cpu:{BACKEND}"),  # while the host waits in it, the device makes progress
)
_NAMES = {
    "cuda": NAME,
    "is_cuda": f"is_{NAME}",
    "is_nccl_available": "is_gloo_available",  # the device's backend is built on gloo's
    "TEST_CUDA": "TEST_PRIVATEUSE1",
}
_KEPT = ("torch.backends.cuda", "torch.version.cuda", "torch.cuda.nccl")
"""Names about the build of torch: the device has no counterpart."""
_KEPT_ENDS = {name.rpartition(".")[2] for name in _KEPT}
_GLOO = "gloo"
_WITH_BACKEND = ("init_process_group", "new_group")
"""Functions whose backend gloo has tensors of CUDA, too."""
_CUDA_AMP, _AMP = "torch.cuda.amp", "torch.amp"
"""Module whose functions are for CUDA, and the one whose functions take the type of a device first."""


class Translated(NamedTuple):
    """Code of a program for the simulated device."""

    code: CodeType
    replacements: int
    """Number of replaced names and strings: 0 for a program that takes any accelerator."""


@cache
def translated(file: Path) -> Translated:
    """Return the code of a Python file for the simulated device. Raises SyntaxError and OSError as an import does."""
    tree = ast.parse(file.read_bytes(), str(file))
    translator = _Translator()
    code = compile(translator.visit(tree), str(file), "exec", dont_inherit=True)
    return Translated(code, translator.replacements)


def translate_imports(folders: Sequence[Path] = (), modules: Collection[str] = ()) -> None:
    """Translate from now on each module that is imported from one of the folders, or has one of the dotted names."""
    sys.meta_path.insert(0, _Finder([folder.resolve() for folder in folders], frozenset(modules)))


class _Translator(ast.NodeTransformer):
    def __init__(self) -> None:
        self.replacements = 0
        self._cuda_amp_names: set[str] = set()
        """Names under which the program has functions of `torch.cuda.amp`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        is_without = all(keyword.arg != "device" for keyword in node.keywords)
        default_is_cuda = name.rpartition(".")[2] == "GradScaler" and not node.args and is_without
        if default_is_cuda or name in self._cuda_amp_names or name.startswith(f"{_CUDA_AMP}."):
            node.args.insert(0, ast.copy_location(ast.Constant(NAME), node))
            self.replacements += 1
        if name.rpartition(".")[2] in _WITH_BACKEND:
            self._serve_both_devices([*node.args, *(keyword.value for keyword in node.keywords)])
        return self.generic_visit(node)

    def _serve_both_devices(self, arguments: list[ast.expr]) -> None:
        for argument in arguments:
            if isinstance(argument, ast.Constant) and argument.value == _GLOO:
                argument.value = BACKENDS
                self.replacements += 1

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_docstring = isinstance(node.value, ast.Constant)
        return node if is_docstring else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = self._text(node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in _KEPT_ENDS and ast.unparse(node) in _KEPT:
            return node
        if node.attr == "amp" and ast.unparse(node) == _CUDA_AMP:
            return ast.copy_location(ast.parse(_AMP, mode="eval").body, node)
        node.attr = self._name(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id != "cuda":  # a variable
            node.id = self._name(node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._name(node.name)
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            alias.name = self._module(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == _CUDA_AMP:
            self._cuda_amp_names |= {alias.asname or alias.name for alias in node.names}
        node.module = node.module and self._module(node.module)
        for alias in node.names:
            if alias.name == "cuda":
                alias.asname = alias.asname or alias.name
            alias.name = self._name(alias.name)
        return node

    def _module(self, name: str) -> str:
        if name == _CUDA_AMP:
            return _AMP
        is_kept = any(f"{name}.".startswith(f"{kept}.") for kept in _KEPT)
        return name if is_kept or not f"{name}.".startswith("torch.cuda.") else self._text(name)

    def _name(self, name: str) -> str:
        self.replacements += name in _NAMES
        return _NAMES.get(name, name)

    def _text(self, text: str) -> str:
        for pattern, replacement in _STRINGS:
            text, count = pattern.subn(replacement, text)
            self.replacements += count
        return text


class _Loader(SourceFileLoader):
    """Loader without bytecode on disk, which would take the place of the untranslated module's."""

    def get_code(self, fullname: str) -> CodeType:
        return translated(Path(self.get_filename(fullname))).code


class _Finder(MetaPathFinder):
    def __init__(self, folders: Sequence[Path], modules: Collection[str]) -> None:
        self._folders = folders
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        file = Path(spec.loader.path).resolve()
        if fullname not in self._modules and not any(file.is_relative_to(folder) for folder in self._folders):
            return None
        spec.loader = _Loader(fullname, str(file))
        return spec
