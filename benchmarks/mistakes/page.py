"""docs/mistakes.md: runs of each set that are kept, with mistakes, verdicts, and the first causes as they are told."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from tabulate import tabulate

from benchmarks.mistakes import FOLDER, Mistake, MistakeSet, Outcome
from conformance.cli.blocks import with_block
from conformance.project import PROJECT
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

PAGE = PROJECT / "docs" / "mistakes.md"
_COLUMNS = 120
_MARK = re.compile(r"^( *[0-9]*)([-+#>=.)])(?= |$)")
"""Beginning of a line that markdown would take for a list, a heading or a quotation."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one trainer, with a mistake or without."""

    name: str
    is_caught: bool
    """True if a law fails, or the trainer is refused."""
    outcome: Outcome | None
    """How the session ended; None for a trainer that is conformant."""
    failing: list[str]
    """Laws that fail."""
    first_law: str
    text: str
    """First cause as it is told."""
    is_right: bool
    seconds: float


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run of a set, of which the rows are kept: an entry of runs.yaml."""

    title: str
    about: str
    why: dict[str, str] = {}
    """Reasons of the rows that are not right, by name."""


class Rows(msgspec.Struct, frozen=True):
    """Results of a run."""

    mistakes: list[Row]
    correct: list[Row]


def as_markdown(run: Run, rows: Rows, known: Mapping[str, Mistake], *, size: int) -> str:
    """Return the section of a run: a table of verdicts, mistakes with their first causes, and trainers without any.

    `size` is the number of rows of the set, of which those that the run lacks are told.
    """
    missing = size - len(rows.mistakes) - len(rows.correct)
    caught, right = (sum(getattr(row, field) for row in rows.mistakes) for field in ("is_caught", "is_right"))
    conformant = [row.name for row in rows.correct if row.is_right]
    table = [[row.name, _answer(row.is_caught), _answer(row.is_right)] for row in rows.mistakes]
    paragraphs = [
        f"### {run.title}",
        _wrapped(run.about + (f" **{missing} of the {size} rows were not judged.**" if missing else "")),
        f"{caught} of {len(table)} mistakes are caught, {right} with the right first cause." if table else "",
        tabulate(table, headers=["mistake", "caught", "right first cause"], tablefmt="github") if table else "",
        "\n".join(_mistake_item(row, known[row.name], run.why) for row in rows.mistakes),
        _wrapped(
            f"{len(conformant)} of {len(rows.correct)} trainers without mistakes are conformant: "
            f"{', '.join(conformant) or 'none'}."
        ),
        "\n".join(_trainer_item(row, run.why) for row in rows.correct if not row.is_right),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def keep(name: str, rows: Rows, chosen: MistakeSet) -> None:
    """Keep the rows of a run in its set. Raises UsageError if runs.yaml does not describe the run."""
    if name not in _described(chosen):
        raise UsageError(f"{chosen.folder / 'runs.yaml'} does not describe the run {name}")
    file = _kept_file(chosen, name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def written(page: str) -> str:
    """Return the text of the page with the runs that are kept; the block of a set without any stays as it is."""
    for folder in (FOLDER, *sorted(FOLDER.glob("unseen*"))):
        chosen = MistakeSet(folder)
        if sections := list(_sections(chosen)):
            page = with_block(page, folder.name, "\n\n".join(sections))
    return page


def _sections(chosen: MistakeSet) -> Iterator[str]:
    """Yield the section of each run of a set that is kept."""
    mistakes = chosen.mistakes
    for name, run in _described(chosen).items():
        if (file := _kept_file(chosen, name)).exists():
            rows = msgspec.json.decode(file.read_bytes(), type=Rows)
            yield as_markdown(run, rows, mistakes, size=len(mistakes) + len(chosen.subjects))


def _described(chosen: MistakeSet) -> dict[str, Run]:
    return convert(load(chosen.folder / "runs.yaml"), dict[str, Run])


def _kept_file(chosen: MistakeSet, run: str) -> Path:
    return chosen.folder / "runs" / f"{run}.json"


def _answer(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def _mistake_item(row: Row, mistake: Mistake, why: Mapping[str, str]) -> str:
    """Return an item of a list: the mistake, its first cause as told, and the reason if that is not right."""
    told = f" Told: {_plain(row.text)}" if row.text else " Nothing is told."
    reason = "" if row.is_right else f" **Not right**: {_plain(why.get(row.name, '?'))}"
    return _wrapped(f"- **{row.name}** ({mistake.trainer}): {_plain(mistake.what)}.{told}{reason}")


def _trainer_item(row: Row, why: Mapping[str, str]) -> str:
    """Return an item of a list: a trainer without a mistake, the reason of its verdict, and the cause as told."""
    return _wrapped(f"- **{row.name}** is not: {_plain(why.get(row.name, '?'))} Told: {_plain(row.text)}")


def _plain(text: str) -> str:
    """Return one line of text in markdown."""
    return " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*")


def _wrapped(paragraph: str) -> str:
    """Return a paragraph, or an item of a list, in lines of a page's width."""
    indent = "  " if paragraph.startswith("- ") else ""
    lines = textwrap.wrap(paragraph, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join([lines[0], *(_MARK.sub(r"\1\\\2", line) for line in lines[1:])])
