"""Cache of Inductor, in which a compilation that was killed leaves an empty library.

Inductor lets the compiler write a library to its final path and loads whatever exists there
(`torch/_inductor/codecache.py`), so that every later process fails with "file too short". The module can go when torch
renames a library that is complete.
"""

import getpass
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory() -> Path:
    """Return the directory that Inductor uses.

    Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
    """
    return Path(os.environ.get(_VARIABLE) or Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))


def remove_unfinished_libraries() -> None:
    """Remove libraries that are empty and that no process writes."""
    empty = {file for file in cache_directory().rglob("*.so") if _is_empty(file)}
    if empty:
        for file in empty - _open_files():
            file.unlink(missing_ok=True)


def _is_empty(file: Path) -> bool:
    with suppress(FileNotFoundError):
        return file.stat().st_size == 0
    return False


def _open_files() -> set[Path]:
    """Return the files that processes of this user have open."""
    opened = set[Path]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            opened.update(Path(file.path) for file in process.open_files())
    return opened
