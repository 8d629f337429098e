"""Examples of subjects by the kind of model or of training, which `conformance judge --init` writes."""

import ast
from pathlib import Path

from conformance.project import PACKAGE
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

DEFAULT_KIND = "language-model"
LOOP_KIND = "own-loop"
ADVICE = ("What to say", "What is different", "Not judged", "Typical mistakes")
"""First words of the paragraphs of an example's docstring, after its commands."""
_DIRECTORY = PACKAGE / "subjects" / "examples"
_SUFFIX = ".py.txt"


def kinds() -> list[str]:
    """Return the names of all kinds, the default first."""
    names = sorted(file.name.removesuffix(_SUFFIX).replace("_", "-") for file in _DIRECTORY.glob(f"*{_SUFFIX}"))
    return sorted(names, key=lambda name: name != DEFAULT_KIND)


def example(kind: str) -> str:
    """Return the text of a kind's example, in whose docstring `FILE` stands for the file that it becomes.

    Raises UsageError, with what is allowed, for an unknown kind.
    """
    if kind not in kinds():
        raise UsageError(f"unknown kind `{kind}`{allowed(kind, kinds())}")
    return (_DIRECTORY / f"{kind.replace('-', '_')}{_SUFFIX}").read_text()


def write_example(kind: str, file: Path) -> list[str]:
    """Write a kind's example into a new file; returns the commands that judge its subjects.

    Raises UsageError for an unknown kind, and for a file that exists or is no Python file.
    """
    text = example(kind).replace("FILE:", f"{file}:")
    if file.suffix != ".py":
        raise UsageError(f"{file} is no Python file: give a name that ends in .py")
    if file.exists():
        raise UsageError(f"{file} exists: give another name, or remove it")
    file.write_text(text)
    return commands(text)


def commands(text: str) -> list[str]:
    """Return the commands that judge the subjects of an example's text."""
    return [line.strip() for line in _docstring(text).splitlines() if line.startswith("    conformance judge ")]


def described(kind: str) -> tuple[str, str]:
    """Return the subject of a kind's example, and its differences from other kinds, of the example's docstring."""
    title = _docstring(example(kind)).splitlines()[0].partition(", judged by")[0].rstrip(".")
    return title, advice(kind)["What is different"]


def advice(kind: str) -> dict[str, str]:
    """Return the paragraphs of the docstring of a kind's example by their first words, each of `ADVICE`.

    Raises ValueError for an example that lacks one.
    """
    paragraphs = [" ".join(paragraph.split()) for paragraph in _docstring(example(kind)).split("\n\n")]
    found = dict(paragraph.partition(": ")[::2] for paragraph in paragraphs if paragraph.startswith(ADVICE))
    if tuple(found) != ADVICE:
        raise ValueError(f"the example of {kind} says {[*found]}, and {[*ADVICE]} are needed in this order")
    return found


def _docstring(text: str) -> str:
    return ast.get_docstring(ast.parse(text)) or ""
