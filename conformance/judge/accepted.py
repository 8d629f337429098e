"""Failures of a trainer that its owner accepts, from a file of the owner: cases are run, and must fail until a day."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.judge.waivers import KnownFailure
from conformance.plan.matrix import Case
from conformance.plan.selection import parse
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed, convert, load

ACCEPTED = (Verdict.FAIL, Verdict.CRASH)
"""Verdicts that can be accepted: after a run that hangs, others are not judged, and an error is the suite's own."""


class AcceptedFailure(KnownFailure, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure that is accepted, with its line in the owner's file."""

    place: str
    """File and line of the entry."""
    has_expired: bool
    """True if the last day was past when the session began."""

    def judge(self, verdict: Verdict, reason: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        """Return the verdict on a case that matches: `waived`, or a failure if the entry has to be removed."""
        if verdict == Verdict.PASS:
            return Verdict.UNEXPECTED_PASS, f"passes, although {self.place} accepts its failure: remove the entry"
        if verdict not in ACCEPTED:
            return verdict, reason
        if self.has_expired:
            return verdict, f"{reason}; {self.place} accepts this until {self.expires}, which is past: remove the entry"
        link = f", {self.issue}" if self.issue else ""
        return Verdict.WAIVED, f"accepted until {self.expires} ({self.reason}{link}): {reason}"


class AcceptedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a file of accepted failures."""

    schema: Literal[1]
    accepted: list[KnownFailure]


def load_accepted(file: Path, cases: Sequence[Case], *, today: datetime.date) -> list[AcceptedFailure]:
    """Read the failures that a file accepts of the trainer of these cases, which are all that it has.

    Raises UsageError, with file and line, for a file that cannot be read, an unknown law or axis, a date that is none,
    an entry that applies to no case, and two that apply to the same case.
    """
    document = load(file)
    trainer, laws = cases[0].trainer, list(dict.fromkeys(case.law for case in cases))
    taken: dict[Case, str] = {}
    found = []
    for index, entry in enumerate(convert(document, AcceptedFile).accepted):
        where = f"$.accepted[{index}]"
        if entry.law not in laws:
            raise document.error(f"{where}.law", f"unknown law `{entry.law}`{allowed(entry.law, laws)}")
        if entry.trainer not in (None, trainer):
            continue
        try:
            selected, last_day = parse(entry.cells), datetime.date.fromisoformat(entry.expires)
        except ValueError as error:
            raise document.error(where, str(error)) from None
        place = document.location(f"{where}.law")
        accepted = [case for case in cases if case.law == entry.law and selected(case.cell)]
        if not accepted:
            raise document.error(where, f"`{entry.cells}` selects no cell on which {entry.law} is judged")
        if twice := [taken[case] for case in accepted if case in taken]:
            raise document.error(where, f"{twice[0]} accepts the same failure: narrow or remove one of them")
        taken |= dict.fromkeys(accepted, place)
        fields = {**msgspec.structs.asdict(entry), "trainer": trainer}
        found.append(AcceptedFailure(**fields, place=place, has_expired=last_day < today))
    return found


def accept(file: Path, entries: Sequence[Mapping[str, str]]) -> None:
    """Add entries, each with the fields of a `KnownFailure` as text, to a file, which is made if there is none.

    Raises UsageError if the file exists and is none of accepted failures.
    """
    if file.exists():
        convert(load(file), AcceptedFile)
        text = file.read_text()
        text += "" if text.endswith("\n") else "\n"
    else:
        text = "schema: 1\naccepted:\n"
    for entry in entries:
        lines = [f"{name}: {msgspec.json.encode(value).decode()}" for name, value in entry.items()]
        text += "".join(f"{'    ' if number else '  - '}{line}\n" for number, line in enumerate(lines))
    file.write_text(text)


def require_day(text: str) -> str:
    """Return a date in ISO 8601. Raises UsageError for any other text, and for a day that is past."""
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text} is no date: write one such as 2027-01-31") from None
    if day < datetime.date.today():
        raise UsageError(f"{text} is past: give a later day")
    return day.isoformat()
