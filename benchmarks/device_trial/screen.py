"""One screen with the results of a call: values of probes, laws by verdict, the first failures, and the time left."""

import collections
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device_trial.stages import Outcome

LINES, COLUMNS = 60, 190
_SHOWN_FAILURES = 4
_BAD = ("fail", "error", "crash", "timeout", "unexpected-pass")


def screen(outcomes: Sequence[Outcome], *, left_s: float) -> str:
    """Return at most `LINES` lines, which end with the number of values that did not fit."""
    cases = [case for outcome in outcomes for case in _cases(outcome)]
    head = [_stage_line(outcome) for outcome in outcomes]
    tail = [*_laws(cases), *_failures(cases), f"{left_s:.0f} s left"]
    values = [f"  {name}: {value}" for outcome in outcomes for name, value in outcome.values.items()]
    room = LINES - len(head) - len(tail)
    if len(values) > room:
        values = [*values[: room - 1], f"  and {len(values) - room + 1} more values in outcomes.json"]
    return "\n".join(line[:COLUMNS] for line in [*head, *values, *tail])


def _stage_line(outcome: Outcome) -> str:
    return f"{outcome.name:<36} {outcome.seconds:>6.1f} s  {outcome.state}"


def _cases(outcome: Outcome) -> list[dict[str, Any]]:
    file = Path(outcome.report, "report.json")
    if not outcome.report or not file.exists():
        return []
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return [case | {"stage": outcome.name} for case in cases]


def _laws(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one line for each substrate and verdict: the laws, with their numbers of cases."""
    counts = collections.Counter((case["substrate"], case["verdict"], case["law"]) for case in cases)
    by_verdict: dict[tuple[str, str], list[str]] = {}
    for (substrate, verdict, law), number in sorted(counts.items()):
        by_verdict.setdefault((substrate, verdict), []).append(law if number == 1 else f"{law} x{number}")
    for (substrate, verdict), laws in by_verdict.items():
        if verdict != "not-run":
            yield f"{substrate} {verdict}: {', '.join(laws)}"


def _failures(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    bad = [case for case in cases if case["verdict"] in _BAD and not case["stage"].startswith("race-")]
    for case in bad[:_SHOWN_FAILURES]:
        yield f"{case['verdict']} {case['id']}: {(case['reason'] or '').splitlines()[0]}"
    if len(bad) > _SHOWN_FAILURES:
        yield f"and {len(bad) - _SHOWN_FAILURES} more"
