"""The report's schema: what other programs read."""

from typing import Any, Literal

import msgspec

from conformance.judge.measurements import Measurement
from conformance.report.cell_facts import CellFacts


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case: a law on a cell."""

    id: str
    """`LAW/CELL`."""
    law: str
    must: str
    cell: str
    substrate: str
    verdict: str
    reason: str
    duration_s: float
    """Set-up, call and tear-down, with the runs that this case had to make."""
    wait_s: float
    """Of which waiting for another worker's run of the same cell."""
    run_s: float
    """Of which running cells; 0 if all records were there."""
    measured: dict[str, Measurement]
    repro: str
    """One command that repeats just this case."""
    nodeid: str


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="type"):
    """First line of report.jsonl."""

    schema: Literal[1] = 1
    session: str
    profile: str
    seed: int
    """What was added to the seed of each cell."""
    started: str
    """Local date and time in ISO 8601: on that day waivers hold or have expired."""
    suite_digest: str
    """Of the code that judges: reports of equal digests can be compared case by case."""
    matrix_digest: str
    defect: str | None
    environment: dict[str, Any]


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag="footer", tag_field="type"):
    """Last line of report.jsonl; without it the session did not end."""

    planned: int
    executed: int
    verdicts: dict[str, int]
    exit_code: int
    duration_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """report.json."""

    schema: Literal[1] = 1
    session: str
    environment: dict[str, Any]
    profile: str
    seed: int
    started: str
    suite_digest: str
    matrix_digest: str
    defect: str | None
    planned: int
    executed: int
    verdicts: dict[str, int]
    exit_code: int
    duration_s: float
    cells: dict[str, CellFacts]
    """Facts beside the verdicts, by cell."""
    cases: list[CaseResult]
