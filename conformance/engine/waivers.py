"""waivers.yaml: known faults of torch. A case that a waiver names is run, and must fail."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conformance.engine.cells import Cell
from conformance.engine.matrix import LawId, Matrix, Text
from conformance.engine.selection import parse
from conformance.engine.verdicts import Verdict
from reference_trainer.strict_yaml import convert, load

Release = tuple[int, ...]
_VERSIONS = r"^[0-9]+\.[0-9]+ - [0-9]+\.[0-9]+\Z"


class Waiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known fault."""

    law: LawId
    cells: Text
    """Selection of cells, see `conformance.engine.selection`."""
    device: Literal["cpu", "cuda"]
    """Where it was seen."""
    torch: Annotated[str, Meta(pattern=_VERSIONS)]
    """First and last release that has it, both included: `2.6 - 2.15`."""
    issue: Annotated[str, Meta(pattern="^https://")]
    reason: Text
    expires: Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")]
    """Last day on which it holds: nobody may forget it."""

    def matches(self, law: str, cell: Cell, *, device: str, torch: Release, today: datetime.date) -> bool:
        first, last = (tuple(int(part) for part in version.split(".")) for version in self.torch.split(" - "))
        return (
            law == self.law
            and device == self.device
            and first <= torch <= last
            and today <= datetime.date.fromisoformat(self.expires)
            and parse(self.cells)(cell)
        )

    def judge(self, verdict: Verdict, reason: str) -> tuple[Verdict, str]:
        """What it makes of a verdict; a hang, a crash or the suite's own error is never waived."""
        if verdict == Verdict.FAIL:
            return Verdict.WAIVED, f"{self.issue}: {self.reason}; {reason}"
        if verdict == Verdict.PASS:
            return Verdict.UNEXPECTED_PASS, f"passes, though waived because of {self.issue}: remove the waiver"
        return verdict, reason


class Waivers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    schema: Literal[1]
    waivers: list[Waiver]


def load_waivers(file: Path, matrix: Matrix) -> list[Waiver]:
    """Read the file. Raises ValueError for one that cannot be read, or a waiver that no case of the matrix needs."""
    waivers = convert(load(file), Waivers).waivers
    for waiver in waivers:
        try:
            selected = parse(waiver.cells)
            datetime.date.fromisoformat(waiver.expires)
        except ValueError as error:
            raise ValueError(f"{file.name}: waiver of {waiver.law}: {error}") from None
        families = (name for name, family in matrix.families.items() if waiver.law in family.laws)
        if not any(selected(cell) for name in families for cell in matrix.cells(name)):
            raise ValueError(f"{file.name}: no case of the matrix is what the waiver of {waiver.law} is for: remove it")
    return waivers


def the_waiver(
    waivers: Sequence[Waiver], law: str, cell: Cell, *, device: str, torch: Release, today: datetime.date
) -> Waiver | None:
    """The waiver of a case. Raises ValueError if there are several: which of them would have to go?"""
    found = [w for w in waivers if w.matches(law, cell, device=device, torch=torch, today=today)]
    if len(found) > 1:
        raise ValueError(f"{law}/{cell.id} has {len(found)} waivers: {', '.join(waiver.issue for waiver in found)}")
    return found[0] if found else None
