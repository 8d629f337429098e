"""Programs of `findings/`, each described by its docstring."""

import ast
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conformance.project import PROJECT
from reference_trainer.checks import UsageError

DIRECTORY = PROJECT / "findings"
TRAINERS = DIRECTORY / "trainers"
"""Directory of the programs about other packages than torch."""
TORCH = "torch"
NO_THREAD = "none known"
_SEVERITIES, _VISIBLE = ("high", "medium", "low"), ("silent", "hang", "loud")
_LAW = r"^([A-Z]+-[0-9]+|[a-z0-9]+(-[a-z0-9]+)*)\Z"
_FIELD = re.compile(r"^(\w+): +(\S.*)$")

Text = Annotated[str, Meta(pattern=r"\S")]


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault of torch or of a trainer, as its program's docstring describes it."""

    name: str
    """Name of the program, without `.py`."""
    title: Text
    """Description of the fault in one sentence: the first paragraph."""
    details: Text
    """Known cause: the paragraphs after the title."""
    severity: Literal["high", "medium", "low"]
    """Damage to a training run that meets the fault."""
    visible: Literal["silent", "hang", "loud"]
    """`silent`: numbers are wrong, or memory is held; `hang`: the run waits until a time limit; `loud`: an error."""
    training: Text
    """Effect on a training run."""
    thread: Annotated[str, Meta(pattern=rf"^(https://\S+|{NO_THREAD})\Z")]
    """Address of a public thread about the fault, or `none known`."""
    law: Annotated[str, Meta(pattern=_LAW)]
    """Law that fails, one for subjects if the fault is a trainer's, or `none`."""
    avoid: Text
    """Advice for users of such a torch."""
    ranks: Annotated[int, Meta(ge=1, le=8)]
    """Number of processes that the program needs."""
    package: Text = TORCH
    """Distribution that has the fault."""

    @property
    def file(self) -> Path:
        """Path of the program."""
        return (DIRECTORY if self.package == TORCH else TRAINERS) / f"{self.name}.py"

    @property
    def has_thread(self) -> bool:
        """True if a public thread describes the fault."""
        return self.thread != NO_THREAD

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """Sort key: severity, then visibility (silent first), then unreported first."""
        return _SEVERITIES.index(self.severity), _VISIBLE.index(self.visible), self.has_thread, self.name


def findings(directory: Path = DIRECTORY) -> list[Finding]:
    """Return the findings of a directory, the worst first.

    Raises UsageError for a program without a valid docstring.
    """
    return sorted(map(read_finding, directory.glob("*.py")), key=lambda finding: finding.order)


def read_finding(file: Path) -> Finding:
    """Return the finding in a program's docstring, without importing the program.

    The first paragraph is the title, the last consists of lines `FIELD: VALUE`, and those between are the details.
    Raises UsageError for a field that is missing, unknown or wrong.
    """
    paragraphs = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")
    fields = dict(_field(line, file) for line in paragraphs[-1].splitlines())
    if not fields:
        raise UsageError(f"{file.name}: write a docstring that ends with lines `severity: high`, ...")
    try:
        about = {**fields, "name": file.stem, "title": " ".join(paragraphs[0].split())}
        about["details"] = "\n\n".join(paragraphs[1:-1])
        return msgspec.convert(about, Finding, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file.name}: the fields of its docstring: {error}") from None


def _field(line: str, file: Path) -> tuple[str, str]:
    match = _FIELD.match(line)
    if match is None:
        raise UsageError(f"{file.name}: the docstring must end with lines `FIELD: VALUE`, found {line!r}")
    return match[1], match[2]
