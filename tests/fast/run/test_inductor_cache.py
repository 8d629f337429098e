"""Tests of the removal of unfinished libraries from the cache of Inductor."""

from pathlib import Path

import pytest

from conformance.run.ranks.inductor_cache import remove_unfinished_libraries


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of an empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    return tmp_path / "ab"


def test_an_empty_library_is_removed_and_a_whole_one_stays(cache: Path) -> None:
    (cache / "killed.main.so").touch()
    (cache / "whole.main.so").write_bytes(b"\x7fELF")
    (cache / "lock").touch()
    remove_unfinished_libraries()
    assert sorted(file.name for file in cache.iterdir()) == ["lock", "whole.main.so"]


def test_a_library_that_a_process_writes_stays(cache: Path) -> None:
    with (cache / "written.main.so").open("wb"):
        remove_unfinished_libraries()
        assert (cache / "written.main.so").exists()
    remove_unfinished_libraries()
    assert not (cache / "written.main.so").exists()


def test_a_cache_that_does_not_exist_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "absent"))
    remove_unfinished_libraries()
    assert not (tmp_path / "absent").exists()
