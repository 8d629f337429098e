"""Examples of subjects by kind, as `conformance judge --init --kind KIND` writes them."""

from pathlib import Path

import pytest

from conformance.run.kinds import DEFAULT_KIND, described, kinds, write_example
from reference_trainer.checks import UsageError


def test_the_default_comes_first() -> None:
    assert kinds()[0] == DEFAULT_KIND


@pytest.mark.parametrize("kind", kinds())
def test_an_example_compiles_names_its_commands_and_says_what_is_different(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    commands = write_example(kind, file)
    compile(file.read_text(), file, "exec")
    assert commands
    assert all(command.startswith(f"conformance judge {file}:") for command in commands)
    assert all(described(kind))


def test_a_wrong_kind_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean `vision`"):
        write_example("visoin", tmp_path / "mine.py")
    with pytest.raises(UsageError, match="no Python file"):
        write_example("vision", tmp_path / "mine.txt")
    (tmp_path / "mine.py").touch()
    with pytest.raises(UsageError, match="exists"):
        write_example("vision", tmp_path / "mine.py")
