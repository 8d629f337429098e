"""Mistakes in small trainers, with the first cause that a report must name in its owner's words.

A set is a folder: `subjects.yaml` names its trainers, and `mistakes.yaml` has mistakes, each an edit of one of them.
`__main__` judges a set: this folder, with forty classic mistakes, or one of those whose names begin with `unseen`, each
of which was committed before any run of it. The trainers themselves are correct, and no test uses those of `correct`
and of the unseen sets.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

FOLDER = Path(__file__).parent
Outcome = Literal["fail", "crash", "hang", "refused"]


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replacement of a text that occurs once."""

    old: str
    new: str


class Mistake(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of mistakes.yaml."""

    trainer: str
    what: str
    cells: str
    """Expression for --cells."""
    first: str
    """First cause in the words of the trainer's owner."""
    words: Sequence[str]
    """Regular expressions, each of which the text of the reported first cause must match."""
    edits: Sequence[Edit]
    outcome: Outcome = "fail"
    laws: Sequence[str] = ()
    """Laws that must be among those that fail."""
    limit_s: int = 60
    changed: str = ""
    """Reason for which the row was changed after a run."""

    def patched(self, text: str) -> str:
        """Return the source of the trainer, given as text, with the mistake.

        Raises UsageError if a text does not occur once.
        """
        for edit in self.edits:
            if text.count(edit.old) != 1:
                raise UsageError(f"{self.trainer}.py has this {text.count(edit.old)} times and not once: {edit.old}")
            text = text.replace(edit.old, edit.new)
        return text

    def is_named(self, text: str) -> bool:
        """Return whether the text of a cause has all words of the first one."""
        return all(re.search(word, text, re.IGNORECASE | re.DOTALL) for word in self.words)


class Subject(NamedTuple):
    """Trainer of a set."""

    file: Path
    name: str
    """Name of the subject in the file."""


class MistakeSet:
    """Folder of trainers, with mistakes in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @property
    def mistakes(self) -> dict[str, Mistake]:
        """Mistakes by id."""
        return convert(load(self.folder / "mistakes.yaml"), dict[str, Mistake])

    @property
    def subjects(self) -> Mapping[str, Subject]:
        """Trainers by the name of their file, in the order of subjects.yaml.

        Raises UsageError if there are files without a row, or rows without a file.
        """
        names = convert(load(self.folder / "subjects.yaml"), dict[str, str])
        files = {file.stem: file for kind in ("trainers", "correct") for file in (self.folder / kind).glob("[a-z]*.py")}
        if names.keys() != files.keys():
            raise UsageError(f"subjects.yaml and files differ: {', '.join(sorted(names.keys() ^ files.keys()))}")
        return {name: Subject(files[name], subject) for name, subject in names.items()}
