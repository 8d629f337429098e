"""Import hook that changes modules of torch, in every process that has this directory on PYTHONPATH.

`MUTANT=MODULE:NUMBER` injects the fault of that number, `MUTANT=MODULE:FILE` another source. `MUTANT=MODULE,...:hits`
lets each statement write its line into the file `MUTANT_HITS` when it is reached for the first time.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

_NAMES, _, _CHANGE = os.environ.get("MUTANT", "").rpartition(":")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source, bypassing the cache."""
        path = self.get_filename(fullname)
        return compile(_changed(self.get_data(path).decode()), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        import syntax  # type: ignore[import-not-found]  # next to this file, not in a package

        if _CHANGE == "hits":
            setattr(module, syntax.HIT, _writer(module.__name__))
        super().exec_module(module)


def _changed(source: str) -> ast.Module:
    import syntax

    if _CHANGE == "hits":
        changed: ast.Module = syntax.with_hits(source)
    elif _CHANGE.isdigit():
        changed = syntax.mutated(source, int(_CHANGE))
    else:
        changed = ast.parse(Path(_CHANGE).read_text())
    return changed


def _writer(name: str) -> Callable[[int], None]:
    seen: set[int] = set()
    file = os.open(os.environ["MUTANT_HITS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def hit(line: int) -> None:
        if line not in seen:
            seen.add(line)
            os.write(file, f"{name}:{line}\n".encode())

    return hit


class _Finder:
    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _NAMES.split(","):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if _NAMES:
    sys.path.append(os.path.dirname(__file__))  # for `syntax`, also in processes that are forked with another path
    sys.meta_path.insert(0, _Finder)
