"""Import of files that are on no path, under unique module names."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_PREFIX = "conformance_file"


def load_file(file: Path, *, with_neighbours: bool = False) -> ModuleType:
    """Return the module of a Python file, which is executed once in a process unless its content changes.

    With `with_neighbours` this process finds modules of the file's directory from now on, as if the file were a script.
    Exceptions of the file itself are passed on.
    """
    path = file.resolve()
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    if with_neighbours and (neighbours := Neighbours(path.parent)) not in sys.meta_path:
        sys.meta_path.insert(0, neighbours)
    return load_module(f"{_PREFIX}_{path.stem}_{digest}", path)


def companion_of(file: Path) -> Path:
    """Return the file that declares how the trainer in a file is judged: beside it, `judge_my_train.py`."""
    return file.with_name(f"judge_{file.name}")


def load_module(name: str, file: Path) -> ModuleType:
    """Return the module of this name, for which a Python file or an extension is loaded unless this process has it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    assert spec is not None, f"{file} ends neither in .py nor as extensions do"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # as an import does: classes of the file name their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True)
class Neighbours(MetaPathFinder):
    """Finder of the modules in a directory, before installed ones but never in place of the standard library's."""

    directory: Path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module at the top level, or None if the directory has none of this name."""
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(fullname, [str(self.directory)])
        is_folder = spec is not None and spec.origin is None  # without __init__.py, so that packages come first
        return None if is_folder and PathFinder.find_spec(fullname) else spec
