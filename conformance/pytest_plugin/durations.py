"""How long cells took in earlier sessions, kept in pytest's cache: the next session starts with the longest.

Nothing else depends on it: without a cache (`-p no:cacheprovider`) cells come in the order of the matrix.
"""

from collections.abc import Iterable

import pytest

from conformance.report.schema import CaseResult

_KEY = "conformance/durations_s"


def remembered_durations_s(config: pytest.Config) -> dict[str, float]:
    """Seconds of all cases of a cell together, by its id. For a session that has started."""
    cache = getattr(config, "cache", None)
    found = cache.get(_KEY, {}) if cache is not None else {}
    return found if isinstance(found, dict) else {}


def remember_durations(config: pytest.Config, results: Iterable[CaseResult]) -> None:
    """Add what a session has run to what is known."""
    cache = getattr(config, "cache", None)
    measured_s: dict[str, float] = {}
    for result in results:
        measured_s[result.cell] = measured_s.get(result.cell, 0.0) + result.duration_s
    if cache is not None:
        ran = {cell: round(duration_s, 3) for cell, duration_s in measured_s.items() if duration_s > 0.0}
        cache.set(_KEY, remembered_durations_s(config) | ran)
