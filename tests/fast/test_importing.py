"""Import of files: each is executed once, under a unique name, and replaces no other module."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance.importing import Neighbours, load_file
from conformance.subjects.decorated import load_subject

COUNTING = "import random\nrandom.loaded = getattr(random, 'loaded', 0) + 1\n"
SUBJECT = """
import random

from conformance.subjects import subject
from helpers import build

def batch(generator):
    import lazily

@subject(model=build, loss=lambda model, batch: None, batch=batch)
def parallelize(model, mesh, config):
    return model
"""


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the modules and finders of this process as they are."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("conformance_file", "helpers", "lazily")):
            del sys.modules[name]


def test_a_file_is_executed_once_until_its_content_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "loaded", 0, raising=False)
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    assert load_file(file) is load_file(tmp_path / "." / "counting.py")
    assert vars(random)["loaded"] == 1
    file.write_text(f"{COUNTING}x = 3\n")
    assert load_file(file).x == 3
    assert vars(random)["loaded"] == 2


def test_a_file_that_raises_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise KeyError('settings')\n")
    for _ in range(2):
        with pytest.raises(KeyError, match="settings"):
            load_file(tmp_path / "broken.py")


def test_a_subject_with_the_name_of_a_library_module_replaces_nothing(tmp_path: Path) -> None:
    file, path = tmp_path / "random.py", [*sys.path]
    file.write_text(SUBJECT)
    (tmp_path / "helpers.py").write_text("def build():\n    return None\n")
    (tmp_path / "lazily.py").touch()
    first, finders = load_subject(f"{file}:parallelize"), [*sys.meta_path]
    first.batch(torch.Generator())
    assert load_subject(f"{file}:parallelize") is first
    assert (sys.path, sys.meta_path) == (path, finders)
    assert sys.modules["random"] is random


def test_neighbours_come_before_installed_modules_but_not_before_the_standard_library(tmp_path: Path) -> None:
    for name in ("statistics", "numpy"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / "scripts_of_mine").mkdir()
    neighbours = Neighbours(tmp_path)
    found = {name: neighbours.find_spec(name, None) for name in ("statistics", "numpy", "torch", "scripts_of_mine")}
    assert [name for name, spec in found.items() if spec] == ["numpy", "scripts_of_mine"]
    assert neighbours.find_spec("numpy", ["a package"]) is None
