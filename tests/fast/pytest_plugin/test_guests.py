"""Decorated trainers of a file, found without executing it."""

from pathlib import Path

import pytest

from conformance.pytest_plugin.guests import decorated
from reference_trainer.checks import UsageError


@pytest.mark.parametrize(
    "text",
    [
        "from conformance.subjects import subject\n@subject()\ndef f(): pass\n@subject()\ndef g(): pass\n",
        "from conformance.subjects import subject as s\n@s()\ndef f(): pass\n@s()\ndef g(): pass\n",
        "from conformance import subjects\n@subjects.subject()\ndef f(): pass\n@subjects.subject()\ndef g(): pass\n",
        "from conformance.subjects import own_loop\n@own_loop()\ndef f(): pass\n@own_loop()\ndef g(): pass\n",
    ],
)
def test_decorated_functions_are_found_by_any_name_of_the_decorator(tmp_path: Path, text: str) -> None:
    file = tmp_path / "my_train.py"
    file.write_text(f"raise SystemExit\n{text}\n@other.subject()\ndef h(): pass\ndef i(): pass\n")
    assert decorated(file) == ["f", "g"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def subject(): pass\n@subject()\ndef f(): pass\n", r"write my_train.py:NAME"),
        ("x = 1\ndef f(:\n", r"my_train.py:2: "),
    ],
)
def test_a_file_without_trainers_is_a_mistake(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "my_train.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        decorated(file)
