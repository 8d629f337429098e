"""Search for the first causes of another trainer's failures, when all cases of a session have their verdicts."""

import importlib
from collections import defaultdict
from typing import NamedTuple

from conformance.judge.verdicts import BAD
from conformance.pytest_plugin.setup import SessionSetup
from conformance.report.causes import Cause, merged
from conformance.report.schema import CaseResult, Report

LOGS = "logs"
"""Directory, below that of the report, with the output of runs that did not finish."""
_LIMIT_S = 20.0
"""Most time of the search, of which each formula's run needs less than a second."""


class TrainerCauses(NamedTuple):
    """First causes, and the first error of the search."""

    causes: list[Cause]
    error: BaseException | None


def trainer_causes(setup: SessionSetup, report: Report) -> TrainerCauses:
    """Return the first causes of a report's failures. Without time to explain, the order of laws alone decides."""
    failed: dict[str, list[CaseResult]] = defaultdict(list)
    for case in report.cases:
        if case.verdict in BAD and case.law != "?":
            failed[case.cell].append(case)
    search = importlib.import_module("conformance.localisation.causes")  # takes torch, which planning does without
    found, error = search.first_causes(
        setup.store,
        failed,
        {location.cell: location for location in report.locations},
        logs=setup.report_directory / LOGS,
        limit_s=min(setup.explain_s, _LIMIT_S),
    )
    return TrainerCauses(merged(found, failed), error)
