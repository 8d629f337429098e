"""Fields of report.json and report.jsonl, which other programs read; docs/report.schema.json is made of them."""

from typing import Any, Literal

import msgspec

from conformance.judge.measurements import Measurement
from conformance.plan.coverage import Coverage
from conformance.report.cell_facts import CellFacts
from conformance.report.smallest import Smallest
from conformance.report.trainer import TrainerFacts

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one case: a law on a cell."""

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
    """Share of `duration_s` spent waiting for another worker's run of the same cell, for devices or processors."""
    run_s: float
    """Share of `duration_s` spent running cells; 0 if all records were there."""
    measured: dict[str, Measurement]
    """Metrics by name, whether they hold or not."""
    repro: str
    """Command that repeats just this case."""
    nodeid: str


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="type"):
    """First line of report.jsonl."""

    schema: Literal[1] = 1
    session: str
    profile: str
    seed: int
    """Number that was added to the seed of each cell."""
    started: str
    """Local date and time in ISO 8601: on that day waivers hold or have expired."""
    suite_digest: str
    """Digest of the code that judges: reports of equal digests can be compared case by case."""
    matrix_digest: str
    defect: str | None
    selection: str
    """Options that selected cases of the profile, as they were given; empty if all cases were selected."""
    environment: dict[str, Any]


class CaseLine(CaseResult, frozen=True, kw_only=True, tag="case", tag_field="type"):
    """Line of report.jsonl between the first and the last: the result of a case."""


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag="footer", tag_field="type"):
    """Last line of report.jsonl; without it the session did not end."""

    planned: int
    executed: int
    verdicts: dict[str, int]
    exit_code: int
    duration_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of report.json."""

    schema: Literal[1] = 1
    session: str
    environment: dict[str, Any]
    profile: str
    seed: int
    started: str
    suite_digest: str
    matrix_digest: str
    defect: str | None
    selection: str
    """Options that selected cases of the profile, as they were given; empty if all cases were selected."""
    planned: int
    executed: int
    verdicts: dict[str, int]
    exit_code: int
    duration_s: float
    cells: dict[str, CellFacts]
    """Facts about cells, by id; no verdict rests on them."""
    coverage: Coverage
    """Combinations and cells of the profile that the session has judged."""
    cases: list[CaseResult]
    smallest: list[Smallest] = []
    """Smallest failing cells that were searched for after the last case, at most one for each cause."""
    trainer: TrainerFacts | None = None
    """Another trainer that was judged; None for the reference trainer."""
    search_failure: str = ""
    """Traceback of what ended the search for these cells before it was done; empty if nothing has."""


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of report.json."""
    return {"$schema": _DIALECT, "title": "report.json", **msgspec.json.schema(Report)}


def line_schema() -> dict[str, Any]:
    """Return the JSON Schema of each line of report.jsonl."""
    return {"$schema": _DIALECT, "title": "line of report.jsonl", **msgspec.json.schema(Header | CaseLine | Footer)}
