"""Classic mistakes in small trainers of six kinds, with the first cause that a report must name in its owner's words.

`mistakes.yaml` has them, each an edit of a file in `trainers`; `__main__` judges them. `correct` has trainers without
mistakes, which no test uses.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

FOLDER = Path(__file__).parent
FILE = FOLDER / "mistakes.yaml"
TRAINERS = FOLDER / "trainers"
SUBJECTS: Mapping[str, str] = {
    "llm_tp": "parallelize",
    "vision": "parallelize",
    "pretrain": "Pretraining",
    "moe": "Recipe",
    "script": "train",
    "diffusion": "parallelize",
}
"""Subject in the file of each trainer."""
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

    def source(self) -> str:
        """Return the source of the trainer with the mistake.

        Raises UsageError if a text does not occur once.
        """
        text = (TRAINERS / f"{self.trainer}.py").read_text()
        for edit in self.edits:
            if text.count(edit.old) != 1:
                raise UsageError(f"{self.trainer}.py has this {text.count(edit.old)} times and not once: {edit.old}")
            text = text.replace(edit.old, edit.new)
        return text

    def is_named(self, text: str) -> bool:
        """Return whether the text of a cause has all words of the first one."""
        return all(re.search(word, text, re.IGNORECASE | re.DOTALL) for word in self.words)


def mistakes() -> dict[str, Mistake]:
    """Return the mistakes by id."""
    return convert(load(FILE), dict[str, Mistake])
