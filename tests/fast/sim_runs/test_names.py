"""Names that recorded runs repeat: the same for a process of the same name, and unique in one run."""

import tempfile
import uuid
from pathlib import Path

import pytest

from conformance.sim_runs.pytorch_tests.names import own_temporary_directory, repeat_names


def names() -> list[str]:
    repeat_names()
    own_temporary_directory()
    return [tempfile.mkdtemp(), tempfile.mkdtemp(), str(uuid.uuid4()), str(uuid.uuid4())]


def test_two_runs_choose_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_name_sequence", None)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(uuid, "uuid4", uuid.uuid4)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = names()
    assert names() == first
    assert len({*first}) == len(first)
    assert Path(first[0]).parent == tmp_path / "temporary"
