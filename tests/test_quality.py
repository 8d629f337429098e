"""The project's own rules, checked: style, types, size, direction of dependencies, use of torch's private names."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conformance.project import PROJECT

MAX_LINES = 400
PRIVATE_NAMES_ALLOWED_IN = {
    "conformance/instruments/dispatch_tap.py": "the dispatch mode has no public name",
    "conformance/instruments/fake_tensors.py": "fake tensors have no public name; an error names them if they are gone",
    "conformance/instruments/collectives.py": "functional collectives name their group",
    "conformance/instruments/allocator_snapshot.py": "documented under these names; without them there is no snapshot",
    "conformance/instruments/delays.py": "nothing public keeps a stream busy; an error names it if it is gone",
    "conformance/experiments/simulation.py": "the fake process group is private; an error names it if it is gone",
    "conformance/run/ranks/preload.py": "names a module to load, and does without it where it is missing",
    "reference_trainer/__main__.py": "silences a logger, which is harmless where it does not exist",
    "conformance/defects/": "a fault is put where the real one was",
}
MUST_NOT_IMPORT = {
    "reference_trainer/": ("conformance", "pytest"),
    "conformance/oracles/": ("conformance.laws", "conformance.defects", "conformance.instruments", "pytest"),
    "conformance/instruments/": ("conformance.laws", "conformance.defects", "conformance.oracles", "pytest"),
    "conformance/defects/": ("conformance.laws", "conformance.run", "pytest"),
}


def sources(*directories: str) -> list[str]:
    found = [file for directory in directories for file in (PROJECT / directory).rglob("*.py")]
    return sorted(str(file.relative_to(PROJECT)) for file in found)


def tree(file: str) -> ast.Module:
    return ast.parse((PROJECT / file).read_text(), filename=file)


def imports(module: ast.Module) -> Iterator[str]:
    """Dotted names of all that is imported, wherever in the module: for `from a import b` both `a` and `a.b`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("ruff", ["check", "."]), ("ruff", ["format", "--check", "."]), ("mypy", [])],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_tools_have_nothing_to_say(tool: str, arguments: list[str]) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install -e .[dev]")
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sources("conformance", "reference_trainer", "tests"))
def test_no_file_is_too_long(file: str) -> None:
    assert len((PROJECT / file).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", sources("conformance", "reference_trainer"))
def test_dependencies_point_one_way(file: str) -> None:
    forbidden = [package for prefix, names in MUST_NOT_IMPORT.items() if file.startswith(prefix) for package in names]
    wrong = [name for name in imports(tree(file)) if any(is_below(name, package) for package in forbidden)]
    assert not wrong


def private_torch_names(module: ast.Module) -> Iterator[str]:
    """Names below `torch` with a part that begins with one underscore: imported, as an attribute, or as a string."""
    private = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
    roots = {"torch": "torch"}
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            roots.update({alias.asname or alias.name: origin + alias.name for alias in node.names})
    texts = [*imports(module), *(dotted(node, roots) for node in ast.walk(module) if isinstance(node, ast.Attribute))]
    texts += [str(node.value) for node in ast.walk(module) if isinstance(node, ast.Constant)]
    yield from (text for text in texts if private.fullmatch(text))


def dotted(node: ast.expr, roots: dict[str, str]) -> str:
    """`dist._x` as `torch.distributed._x` if that is what `dist` was imported as; "" for other expressions."""
    match node:
        case ast.Name():
            return roots.get(node.id, "")
        case ast.Attribute():
            return f"{dotted(node.value, roots)}.{node.attr}"
        case _:
            return ""


@pytest.mark.parametrize("file", sources("conformance", "reference_trainer"))
def test_private_names_of_torch_stay_in_their_places(file: str) -> None:
    found = sorted(set(private_torch_names(tree(file))))
    assert not found or any(file.startswith(place) for place in PRIVATE_NAMES_ALLOWED_IN), found


def test_the_check_of_private_names_sees_them() -> None:
    program = """
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as hidden
from torch.distributed.tensor import DTensor
def f(self, func):
    "torch._C is only mentioned here"
    dist._x(torch._C.y, DTensor._op, self._own, func.__name__, torch.__version__)
    return getattr("torch.distributed._fsdp", "g")
"""
    assert set(private_torch_names(ast.parse(program))) == {
        "torch.utils._python_dispatch",
        "torch.distributed._x",
        "torch._C",
        "torch._C.y",
        "torch.distributed.tensor.DTensor._op",
        "torch.distributed._fsdp",
    }


@pytest.mark.parametrize("place", PRIVATE_NAMES_ALLOWED_IN)
def test_places_that_may_use_private_names_do(place: str) -> None:
    files = [file for file in sources("conformance", "reference_trainer") if file.startswith(place)]
    used = [name for file in files for name in private_torch_names(tree(file))]
    strings = [file for file in files if re.search(r"""["']_\w+["']""", (PROJECT / file).read_text())]
    assert used or strings, "it no longer needs the exception"


def test_the_controller_does_without_torch() -> None:
    """Listing, options and reports are the work of processes that never train: they must not pay for the import."""
    program = "import sys, conformance.pytest_plugin.session; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, timeout=60, check=False)
    assert done.returncode == 0
