"""Import hook that changes modules of torch, in every process that has this directory on PYTHONPATH.

`MUTANT=MODULE:NUMBER` injects the fault of that number, `MUTANT=MODULE:FILE` another source.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

_NAME, _, _CHANGE = os.environ.get("MUTANT", "").rpartition(":")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source, bypassing the cache."""
        path = self.get_filename(fullname)
        return compile(_changed(self.get_data(path).decode()), path, "exec", dont_inherit=True)


def _changed(source: str) -> ast.Module:
    import syntax  # type: ignore[import-not-found]  # next to this file, not in a package

    changed: ast.Module = (
        syntax.mutated(source, int(_CHANGE)) if _CHANGE.isdigit() else ast.parse(Path(_CHANGE).read_text())
    )
    return changed


class _Finder:
    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if _NAME:
    sys.path.append(os.path.dirname(__file__))  # for `syntax`, also in processes that are forked with another path
    sys.meta_path.insert(0, _Finder)
