"""Calls of sweeps that torch refuses, as measured on releases of torch: the bound on refusals of any later run.

A call that a release refuses and an earlier one computed is a regression, also where the release was measured: the
bound of a subject is the least number of refusals of all measured releases up to the running one. A release that was
not measured has no bound, unless it is later than all that were tried. `python -m conformance refusals DIR --write`
keeps what sessions have measured.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from conformance.torch_release import TRIED, release

REFUSALS_FILE = Path(__file__).with_name("refusals.json")

REFUSED = "calls of "
"""Beginning of the names of metrics about refused calls of a bounded case: `calls of SUBJECT: refused: ERROR`."""

Errors = Mapping[str, int]
"""Number of refused calls by error, as `trials.spelled_error` writes it."""


class Refusals(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Refused calls of one law on one cell."""

    versions: list[str]
    """Measured releases of torch, ascending."""
    errors: dict[str, dict[str, dict[str, int]]]
    """Errors by subject and release; of a release that is left out they are those of the one before, first none."""

    def errors_on(self, subject: str, version: str) -> Errors:
        """Return the errors of a subject on a measured release."""
        found: Errors = {}
        for each in self.versions[: self.versions.index(version) + 1]:
            found = self.errors.get(subject, {}).get(each, found)
        return found

    def measured_up_to(self, version: str) -> list[str]:
        """Return the measured releases that are no later than a version of torch."""
        return [each for each in self.versions if release(each) <= release(version)]

    def put(self, version: str, measured: Mapping[str, Errors]) -> "Refusals":
        """Return the same with another measurement of a release."""
        versions = sorted({*self.versions, version}, key=release)
        every = {
            subject: {
                each: measured.get(subject, {}) if each == version else self.errors_on(subject, each)
                for each in versions
            }
            for subject in sorted({*self.errors, *measured})
        }
        changed = {subject: _changes(errors) for subject, errors in every.items()}
        return Refusals(versions=versions, errors={subject: errors for subject, errors in changed.items() if errors})


def _changes(errors: Mapping[str, Errors]) -> dict[str, dict[str, int]]:
    """Return the errors of releases that differ from those of the release before, sorted by text."""
    before: Errors = {}
    changes = {}
    for version, found in errors.items():
        if found != before:
            changes[version] = dict(sorted(found.items()))
        before = found
    return changes


@cache
def read_refusals() -> dict[str, Refusals]:
    """Return the measured refusals by case, `LAW/CELL`; none if there is no file."""
    if not REFUSALS_FILE.exists():
        return {}
    return msgspec.json.decode(REFUSALS_FILE.read_bytes(), type=dict[str, Refusals])


def refused_on(version: str) -> set[str]:
    """Return the subjects of all cases of which a version of torch refuses calls, as the last measured release did."""
    found = set[str]()
    for known in read_refusals().values():
        for measured in known.measured_up_to(version)[-1:]:
            found |= {subject for subject in known.errors if known.errors_on(subject, measured)}
    return found


def excess(case: str, refused: Mapping[str, Errors], version: str) -> Iterator[tuple[str, int, str]]:
    """Yield the subjects that refuse more calls of a case than measured, with the number and a text."""
    known = read_refusals().get(case)
    measured = known.measured_up_to(version) if known else []
    if known is None or not measured or release(measured[-1]) < release(version) <= TRIED[-1]:
        return
    for subject, errors in refused.items():
        listed = known.errors_on(subject, measured[-1])
        new = {text: number - listed.get(text, 0) for text, number in errors.items() if number > listed.get(text, 0)}
        defaults = f"{subject.partition('(')[0]}(no option)"  # where these are refused, no option was tried
        tried = [each for each in measured if subject == defaults or not known.errors_on(defaults, each)]
        least = min((sum(known.errors_on(subject, each).values()) for each in tried), default=sum(errors.values()))
        lost = sum(errors.values()) - least
        if new:
            yield subject, sum(new.values()), f"not refused so on torch {measured[-1]}: {', '.join(new)}"
        elif lost > 0:
            yield subject, lost, f"computed on an earlier torch: {', '.join(errors)}"
