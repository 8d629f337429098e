"""Fields of report.json and report.jsonl, which other programs read; docs/report.schema.json is made of them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from conformance.judge.accepted import AcceptedFailure
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.plan.coverage import Coverage
from conformance.report.causes import Cause
from conformance.report.facts import CellFacts
from conformance.report.location import Location
from conformance.report.trainer import TrainerFacts
from conformance.torch_coverage.counting import TorchCoverage
from reference_trainer.checks import UsageError

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


class Smallest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Smallest cell on which a law fails as it does in a case of the session."""

    case: str
    """Id of the failed case from whose cell the search began."""
    law: str
    cell: str
    """Id of the smallest cell, which the profile may not have."""
    features: dict[str, str]
    """Minimal non-default values of axes: resetting any one of them removes or changes the failure."""
    bound: dict[str, str]
    """Non-default values that exclusions or the law's scope force on every cell with these features."""
    passes: bool
    """True if the law passes without any one of the features; False if it fails in another way without some."""
    complete: bool
    """False if the search ended before all features were known to be needed."""
    judged: int
    """Number of cases that were judged for the search, besides those of the session."""
    seconds: float
    """Duration of the search."""
    repro: str
    """Command that repeats the law on the smallest cell."""


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
    planned: int
    executed: int
    verdicts: dict[str, int]
    exit_code: int
    duration_s: float
    cells: dict[str, CellFacts]
    """Facts about cells, by id; no verdict rests on them."""
    coverage: Coverage
    """Combinations and cells of the profile that the session has judged."""
    torch_coverage: TorchCoverage | None = None
    """Coverage of torch's own Python by the judged runs; null without `--torch-coverage`."""
    cases: list[CaseResult]
    smallest: list[Smallest] = []
    """Smallest failing cells that were searched for after the last case, at most one for each cause."""
    locations: list[Location] = []
    """First wrong places that were searched for after the last case, at most one for each cause."""
    causes: list[Cause] = []
    """First causes of the failures of another trainer, one for each cell with failures; those of most cells first."""
    trainer: TrainerFacts | None = None
    """Another trainer that was judged; None for the reference trainer."""
    accepted: list[AcceptedFailure] = []
    """Failures of another trainer that its owner accepts, as the session has read them."""
    search_failure: str = ""
    """Traceback of the error that ended the search for smallest cells; empty if it was completed."""
    location_failure: str = ""
    """Traceback of the first error in the search for first wrong places; empty if there was none."""
    calibration_s: float | None = None
    """Time that the calibration took: a fixed piece of work of two ranks, see `experiments.calibration`."""
    expected_s: float | None = None
    """Duration that matrix.lock and the calibration had let expect; an upper bound if laws were left out."""
    workers: int = 1
    """Number of processes that ran cases at the same time."""


def verdict_counts(cases: Iterable[CaseResult]) -> dict[str, int]:
    """Return the number of cases by verdict, in the order of `Verdict`, without those of which there is none."""
    counts = Counter(case.verdict for case in cases)
    return {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}


def read_report(directory: Path) -> Report:
    """Return the report in a directory. Raises UsageError if there is none, or one that cannot be read."""
    try:
        report = msgspec.json.decode((directory / "report.json").read_bytes(), type=Report)
    except OSError as error:
        raise UsageError(f"{directory}: no report: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{directory}: the report is cut off, or of another version of the suite: {error}") from None
    if "torch" not in report.environment.get("packages", {}):
        raise UsageError(f"{directory}: the report does not say of which torch it is: another program has written it")
    return report


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of report.json."""
    return _schema("report.json", Report)


def line_schema() -> dict[str, Any]:
    """Return the JSON Schema of each line of report.jsonl."""
    return _schema("line of report.jsonl", Header | CaseLine | Footer)


def _schema(title: str, content: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, with `$` for the end of a text, which is `Z` escaped in Python alone."""
    schema = msgspec.json.encode(msgspec.json.schema(content)).replace(rb"\\Z", b"$")
    return {"$schema": _DIALECT, "title": title, **msgspec.json.decode(schema)}
