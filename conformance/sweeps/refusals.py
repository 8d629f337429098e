"""Calls of sweeps that torch refuses, and operators that communicate, as measured on releases: bounds for later runs.

A call that a release refuses and an earlier one computed is a regression, also where the release was measured: the
bound of a subject is the least number of refusals of all measured releases up to the running one. So is a call that
communicates where an earlier release computed each rank's result from its own shards. A release that was not measured
has no bound, unless it is later than all that were tried. `python -m conformance refusals DIR --write` keeps what
sessions have measured.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from conformance.torch_release import TRIED, release

REFUSALS_FILE = Path(__file__).with_name("refusals.json")
COMMUNICATIONS_FILE = Path(__file__).with_name("communications.json")

BOUNDED = "calls of "
"""Beginning of the names of metrics about calls of a bounded case, which continue with the subject and with `REFUSED`
or `COMMUNICATING`."""
REFUSED = ": refused: "
"""Text between the subject and the error of refused calls."""
COMMUNICATING = ": communicate in "
"""Text between the subject and the pass of calls that communicate."""

Counts = Mapping[str, int]
"""Number of refused calls by error, as `trials.spelled_error` writes it; or of calls that communicate by pass."""


class CallCounts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Numbers of calls of one law on one cell: of refused calls by error, or of calls that communicate by pass."""

    versions: list[str]
    """Measured releases of torch, ascending."""
    counts: dict[str, dict[str, dict[str, int]]]
    """Counts by subject and release; of a release that is left out they are those of the one before, first none."""

    def on(self, subject: str, version: str) -> Counts:
        """Return the counts of a subject on a measured release."""
        found: Counts = {}
        for each in self.versions[: self.versions.index(version) + 1]:
            found = self.counts.get(subject, {}).get(each, found)
        return found

    def bounding(self, version: str) -> list[str]:
        """Return the measured releases that bound a version of torch; none for a tried one that was not measured."""
        measured = self.measured_up_to(version)
        return [] if measured and release(measured[-1]) < release(version) <= TRIED[-1] else measured

    def measured_up_to(self, version: str) -> list[str]:
        """Return the measured releases that are no later than a version of torch."""
        return [each for each in self.versions if release(each) <= release(version)]

    def put(self, version: str, measured: Mapping[str, Counts]) -> "CallCounts":
        """Return the same with another measurement of a release."""
        versions = sorted({*self.versions, version}, key=release)
        every = {
            subject: {
                each: measured.get(subject, {}) if each == version else self.on(subject, each) for each in versions
            }
            for subject in sorted({*self.counts, *measured})
        }
        changed = {subject: _changes(counts) for subject, counts in every.items()}
        return CallCounts(versions=versions, counts={subject: counts for subject, counts in changed.items() if counts})


def _changes(counts: Mapping[str, Counts]) -> dict[str, dict[str, int]]:
    """Return the counts of releases that differ from those of the release before, sorted by text."""
    before: Counts = {}
    changes = {}
    for version, found in counts.items():
        if found != before:
            changes[version] = dict(sorted(found.items()))
        before = found
    return changes


@cache
def read_refusals() -> dict[str, CallCounts]:
    """Return the measured refusals by case, `LAW/CELL`; none if there is no file."""
    return _read(REFUSALS_FILE)


@cache
def read_communications() -> dict[str, CallCounts]:
    """Return the measured calls that communicate by case, `LAW/CELL`; none if there is no file."""
    return _read(COMMUNICATIONS_FILE)


def _read(file: Path) -> dict[str, CallCounts]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, CallCounts]) if file.exists() else {}


def refused_on(version: str) -> set[str]:
    """Return the subjects of all cases of which a version of torch refuses calls, as the last measured release did."""
    found = set[str]()
    for known in read_refusals().values():
        for measured in known.measured_up_to(version)[-1:]:
            found |= {subject for subject in known.counts if known.on(subject, measured)}
    return found


def newly_refused(case: str, refused: Mapping[str, Counts], version: str) -> Iterator[tuple[str, int, str]]:
    """Yield the subjects that refuse more calls of a case than measured, with the number and a text."""
    known = read_refusals().get(case)
    measured = known.bounding(version) if known else []
    if known is None or not measured:
        return
    for subject, errors in refused.items():
        listed = known.on(subject, measured[-1])
        new = {text: number - listed.get(text, 0) for text, number in errors.items() if number > listed.get(text, 0)}
        defaults = f"{subject.partition('(')[0]}(no option)"  # where these are refused, no option was tried
        tried = [each for each in measured if subject == defaults or not known.on(defaults, each)]
        least = min((sum(known.on(subject, each).values()) for each in tried), default=sum(errors.values()))
        lost = sum(errors.values()) - least
        if new:
            yield subject, sum(new.values()), f"not refused so on torch {measured[-1]}: {', '.join(new)}"
        elif lost > 0:
            yield subject, lost, f"computed on an earlier torch: {', '.join(errors)}"


def newly_communicating(
    case: str, communicating: Mapping[str, Counts], refused: Mapping[str, Counts], version: str
) -> Iterator[tuple[str, int, str]]:
    """Yield the subjects of which more calls of a case communicate than measured, with the number and a text.

    A call that a measured release refused may communicate.
    """
    known, refusals = read_communications().get(case), read_refusals().get(case)
    if known is None:
        return
    for subject, passes in communicating.items():
        now = sum(refused.get(subject, {}).values())
        for name, number in passes.items():
            bounds = {
                each: known.on(subject, each).get(name, 0) + max(0, _refused(refusals, subject, each) - now)
                for each in known.bounding(version)
            }
            at = min(bounds, key=lambda each: bounds[each], default=None)
            if at is not None and number > bounds[at]:
                yield subject, number - bounds[at], f"did not communicate in {name} on torch {at}"
                break


def _refused(refusals: CallCounts | None, subject: str, version: str) -> int:
    if refusals is None or version not in refusals.versions:
        return 0
    return sum(refusals.on(subject, version).values())
