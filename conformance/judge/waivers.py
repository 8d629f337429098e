"""Waivers of known faults of torch, from waivers.yaml; a waived case is run, and must fail."""

import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from conformance.judge.measurements import Measurement, margin_of
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.content import LawId, Profile, Text
from conformance.plan.matrix import Case, Matrix
from conformance.plan.selection import parse
from conformance.torch_release import Release, release
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import convert, load

_Versions = Annotated[str, Meta(pattern=r"^[0-9]+\.[0-9]+ - [0-9]+\.[0-9]+\Z")]
"""First and last release, both included: `2.6 - 2.15`."""
Day = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")]
"""Date in ISO 8601: `2027-01-31`."""


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metric that a known fault drives out of its bounds, with the values that the fault explains."""

    metric: Text
    """Name of the metric in the report; `*` stands for any characters."""
    least: float
    """Smallest value that the fault explains, in the unit of the metric."""
    most: float
    """Largest value that the fault explains."""
    finding: Text | None = None
    """Program of `findings/` that shows this fault alone, where a waiver covers several."""
    torch: _Versions | None = None
    """Releases that show the symptom, if not all of the waiver's do."""
    cells: Text | None = None
    """Selection of the cells that show the symptom, if not all of the waiver's do."""

    def explains(self, name: str, metric: Measurement) -> bool:
        """Return whether the fault explains this metric; it never explains a value that is not finite."""
        value = metric.value
        return value is not None and self.least <= value <= self.most and fnmatchcase(name, self.metric)


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure of a law on some cells that is known: it has a reason, and a last day so that it is not forgotten."""

    law: LawId
    trainer: Text | None = None
    """Trainer that shows the fault, by the name in reports; left out for the reference trainer."""
    cells: Text = "world > 1"
    """Selection of cells, see `conformance.plan.selection`; the default selects all that trainers have."""
    issue: Text | None = None
    """Address of a page about the failure."""
    reason: Text
    """Description of the fault."""
    expires: Day
    """Last day on which the failure is excused."""

    def matches(self, case: Case, *, device: str, torch: Release) -> bool:
        """Return whether the failure is one of this case, on this type of device with this release of torch."""
        return (self.law, self.trainer) == (case.law, case.trainer) and parse(self.cells)(case.cell)

    def on(self, cell: Cell, torch: Release) -> Self:
        """Return the failure as a cell shows it with a release of torch."""
        return self

    def judge(self, verdict: Verdict, reason: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        """Return the verdict on a case that matches, given its metrics by name."""
        raise NotImplementedError


class Waiver(KnownFailure, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Known fault of torch: a law that it breaks on some cells."""

    cells: Text
    """Selection of cells, see `conformance.plan.selection`."""
    device: Literal["cpu", "cuda"]
    """Type of device on which the fault was seen."""
    torch: _Versions
    """Releases that have the fault."""
    issue: Annotated[str, Meta(pattern="^(https://|findings/)")]
    """Address of the issue, or page of this project on faults without a known issue."""
    shows: Annotated[list[Symptom], Meta(min_length=1)]
    """Metrics that fail, and by how much; a failure of another metric or size is not waived."""

    @property
    def versions(self) -> tuple[Release, Release]:
        """First and last release of torch that has the fault."""
        return _releases(self.torch)

    def on(self, cell: Cell, torch: Release) -> Self:
        """Return the waiver with the symptoms that a cell shows with a release."""
        shown = [
            symptom
            for symptom in self.shows
            if (symptom.torch is None or _includes(symptom.torch, torch))
            and (symptom.cells is None or parse(symptom.cells)(cell))
        ]
        return msgspec.structs.replace(self, shows=shown)

    def matches(self, case: Case, *, device: str, torch: Release) -> bool:
        """Return whether the waiver applies to this case, on this type of device with this release of torch."""
        applies = self.device == device and _includes(self.torch, torch)
        return applies and super().matches(case, device=device, torch=torch)

    def overlaps(self, other: "Waiver", cells: Iterable[Cell]) -> bool:
        """Return whether both waivers apply to one of these cells: its pass would not show which one to remove."""
        (first, last), (others_first, others_last) = self.versions, other.versions
        alike = (self.law, self.trainer, self.device) == (other.law, other.trainer, other.device)
        if not alike or first > others_last or others_first > last:
            return False
        selects, other_selects = parse(self.cells), parse(other.cells)
        return any(selects(cell) and other_selects(cell) for cell in cells)

    def judge(self, verdict: Verdict, reason: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        """Return the verdict on a waived case, given its metrics by name.

        A hang, a crash or the suite's own error is never waived, nor is a failure that the waiver does not describe.
        """
        if verdict == Verdict.PASS:
            return Verdict.UNEXPECTED_PASS, f"passes, although {self.issue} is waived: remove the waiver"
        if verdict != Verdict.FAIL:
            return verdict, reason
        unexplained = self._unexplained(measured)
        if unexplained:
            return Verdict.FAIL, f"{reason}; {unexplained}, which the waiver of {self.issue} does not cover"
        return Verdict.WAIVED, f"{self.issue}: {self.reason}; {reason}"

    def _unexplained(self, measured: Mapping[str, Measurement]) -> str:
        """Return the metrics out of bounds that are no symptom of the fault; empty if the waiver covers the failure."""
        broken = {name: metric for name, metric in measured.items() if margin_of(metric) > 1.0}
        if not broken:
            return "no metric is out of its bounds"
        others = [
            f"{name} is {metric.value}"
            for name, metric in broken.items()
            if not any(symptom.explains(name, metric) for symptom in self.shows)
        ]
        return ", ".join(others)


def _releases(versions: str) -> tuple[Release, Release]:
    first, last = map(release, versions.split(" - "))
    return first, last


def _includes(versions: str, torch: Release) -> bool:
    first, last = _releases(versions)
    return first <= torch <= last


class Waivers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of waivers.yaml."""

    schema: Literal[1]
    waivers: list[Waiver]


def load_waivers(file: Path, matrix: Matrix) -> list[Waiver]:
    """Read waivers.yaml.

    Raises UsageError for a file that cannot be read, for a waiver that no case of the matrix needs, and for two waivers
    that apply to the same case.
    """
    waivers = convert(load(file), Waivers).waivers
    cells = {law: matrix.cells_of(law) for law in {waiver.law for waiver in waivers}}
    for waiver in waivers:
        if (waiver.law in matrix.trainer_scopes) != (waiver.trainer is not None):
            raise UsageError(
                f"{file.name}: waiver of {waiver.law}: laws of any trainer need `trainer`, and no other law has one"
            )
        try:
            selected = parse(waiver.cells)
            datetime.date.fromisoformat(waiver.expires)
        except ValueError as error:
            raise UsageError(f"{file.name}: waiver of {waiver.law}: {error}") from None
        for symptom in waiver.shows:
            if symptom.least > symptom.most:
                raise UsageError(
                    f"{file.name}: waiver of {waiver.law}: {symptom.metric} shows values from {symptom.least} to "
                    f"{symptom.most}: exchange `least` and `most`"
                )
            first, last = _releases(symptom.torch or waiver.torch)
            if not waiver.versions[0] <= first <= last <= waiver.versions[1]:
                raise UsageError(
                    f"{file.name}: waiver of {waiver.law}: {symptom.metric} is of torch {symptom.torch}: name releases "
                    f"of the waiver, {waiver.torch}, the first one first"
                )
        waived = [cell for cell in cells[waiver.law] if selected(cell)]
        if not waived:
            raise UsageError(f"{file.name}: the waiver of {waiver.law} applies to no case of the matrix: remove it")
        for symptom in waiver.shows:
            if symptom.cells is not None and not any(map(parse(symptom.cells), waived)):
                raise UsageError(
                    f"{file.name}: waiver of {waiver.law}: {symptom.metric} is of no case of the waiver: name others "
                    f"than {symptom.cells}"
                )
    for waiver, other in itertools.combinations(waivers, 2):
        if waiver.overlaps(other, cells[waiver.law]):
            raise UsageError(f"{file.name}: two waivers of {waiver.law} apply to the same case: narrow one of them")
    return waivers


Known = TypeVar("Known", bound=KnownFailure)


def waiver_of(waivers: Sequence[Known], case: Case, *, device: str, torch: Release) -> Known | None:
    """Return the waiver of a case, if any, with the symptoms of this release of torch."""
    matching = (waiver for waiver in waivers if waiver.matches(case, device=device, torch=torch))
    return next((waiver.on(case.cell, torch) for waiver in matching), None)


def profile_waivers(
    matrix_file: Path, matrix: Matrix, profile: Profile, *, today: datetime.date
) -> tuple[list[Waiver], list[Waiver]]:
    """Return the waivers that a profile allows: the valid ones, and those that have expired.

    They are in waivers.yaml in the directory of the matrix, if there is such a file. Raises UsageError as
    `load_waivers` does.
    """
    file = matrix_file.with_name("waivers.yaml")
    if not file.exists() or Verdict.WAIVED not in profile.allows:
        return [], []
    waivers = load_waivers(file, matrix)
    expired = [waiver for waiver in waivers if datetime.date.fromisoformat(waiver.expires) < today]
    return [waiver for waiver in waivers if waiver not in expired], expired


def expired_warning(expired: Sequence[Waiver]) -> str:
    """Return a warning of one line about waivers that have expired; empty if there are none."""
    if not expired:
        return ""
    named = ", ".join(f"{waiver.law} ({waiver.issue}, until {waiver.expires})" for waiver in expired)
    return f"expired waivers waive nothing: {named}; check the issues, then remove the waivers or set new dates"
