"""Symptoms: observations of users, with the law, the command and the defect that belong to them."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from conformance.findings.table import NO_LAW, Finding
from reference_trainer.checks import Config
from reference_trainer.strict_yaml import convert, load

_FILE = Path(__file__).with_name("symptoms.yaml")
_WRAP = 100
_INTRODUCTION = """# Symptoms: from an observation to a law

Written by `python -m conformance docs --write` from conformance/findings/symptoms.yaml and from the programs of
[findings](../findings/README.md).

Each command judges torch with the suite's own trainer on the smallest cell that shows such a fault. If the law fails,
or is waived, the fault is torch's. If it passes, look at your trainer: `conformance show DEFECT` explains a fault with
this symptom, and `--defect DEFECT` behind the command injects it, so that you can compare its numbers with yours."""
_OF_TORCH = """## Faults of released torch

Each program shows one fault on the installed torch in seconds. Its law is that which fails, or is waived."""
_THREAD = re.compile(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/([0-9]+)$")


class Symptom(Config, frozen=True, kw_only=True):
    """Observation, and its explanation."""

    symptom: str
    """Sentence of a user, or the beginning of one that `why` goes on with."""
    why: str
    """Sentences about the fault behind it."""
    law: str
    cells: str
    """Cells as `--cells` takes them: the smallest on which the law sees the defect."""
    threads: tuple[str, ...]
    """Addresses of public threads."""
    defect: str
    """Id of the defect that has this symptom."""


class Chapter(Config, frozen=True, kw_only=True):
    """Symptoms with a subject in common."""

    chapter: str
    entries: tuple[Symptom, ...]


class _File(Config, frozen=True, kw_only=True):
    schema: Literal[1]
    chapters: tuple[Chapter, ...]


def read_symptoms(file: Path = _FILE) -> tuple[Chapter, ...]:
    """Return the symptoms by chapter. Raises ConfigError for a file with a mistake."""
    return convert(load(file), _File).chapters


def symptoms_markdown(chapters: Sequence[Chapter], findings: Sequence[Finding]) -> str:
    """Return docs/symptoms.md: symptoms of defects by chapter, then those of the findings by law."""
    blocks = [_INTRODUCTION]
    for chapter in chapters:
        blocks += [f"## {chapter.chapter}", *map(_entry, chapter.entries)]
    by_law = sorted(findings, key=lambda finding: (finding.law, finding.name))
    return "\n\n".join([*blocks, _OF_TORCH, *map(_finding, by_law)]) + "\n"


def _entry(symptom: Symptom) -> str:
    threads = ", ".join(f"[{_name(address)}]({address})" for address in symptom.threads)
    text = f"- **{symptom.symptom}** {symptom.why} {symptom.law}; {threads}; `{symptom.defect}`."
    return f"{_wrapped(text)}\n\n      pytest conformance/ --laws {symptom.law} --cells {_quoted(symptom.cells)}"


def _finding(finding: Finding) -> str:
    thread = f"; [{_name(finding.thread)}]({finding.thread})" if finding.has_thread else ""
    law = "No law has such a case" if finding.law == NO_LAW else finding.law
    text = f"- **{finding.title.rstrip('.')}.** {law}{thread}."
    return f"{_wrapped(text)}\n\n      python -m conformance findings {finding.name}"


def _name(address: str) -> str:
    """Return a short name of a thread, such as `pytorch 149205`."""
    match = _THREAD.match(address)
    return f"{match[1]} {match[2]}" if match else address


def _quoted(cells: str) -> str:
    return f"'{cells}'" if " " in cells else cells


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WRAP, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
