"""Outcomes of a sweep as text and as a page: counts, and a row for each operator that is not equal."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from tabulate import tabulate

from conformance.sim_runs.operators.cases import Case, Judged, Outcome

Sweep = Mapping[str, Mapping[Case, Judged]]
"""Outcomes by schedule and case."""
_HEAD = """# Operators on the simulated device

`python -m conformance sim operators --write` has written this page, with torch {torch}.

It calls each operator of torch's own database with all its samples on `sim` and on the CPU. Results are equal if every
bit, dtype, shape and stride is, of outputs and gradients. A case is an operator, a dtype and a variant: the function
(with its gradients), the method, in place, with `out=`, a write into its views, and under autocast to bfloat16.

Under autocast the device follows CUDA's policies, and the CPU its own: other dtypes, and bits after other casts, are
no faults.
"""


def has_problems(sweep: Sweep) -> bool:
    """Return whether an operator has other results, or ends its process."""
    worst = (Outcome.DIFFERS, Outcome.DIED)
    return any(judged.outcome in worst for outcomes in sweep.values() for judged in outcomes.values())


def as_text(sweep: Sweep) -> str:
    """Return the counts, and the operators that are not equal, for a terminal."""
    return "\n\n".join([_table(_counts(sweep), "simple"), _table(_rows(sweep), "simple")])


def as_markdown(sweep: Sweep) -> str:
    """Return the content of docs/sim/operators.md, without its last newline."""
    rows = [{key: text.replace("|", "/") for key, text in row.items()} for row in _rows(sweep)]
    for row in rows:
        row["reason"] = f"`{row['reason'].replace('`', '')}`"
    return "\n".join(
        [_HEAD.format(torch=torch.__version__), _table(_counts(sweep), "github"), "", _table(rows, "github")]
    )


def _table(rows: list[dict[str, str]], style: str) -> str:
    return tabulate(rows, headers="keys", tablefmt=style) if rows else "All are equal."


def _counts(sweep: Sweep) -> list[dict[str, str]]:
    rows = []
    for schedule, outcomes in sweep.items():
        counts: dict[tuple[str, str], Counter[Outcome]] = defaultdict(Counter)
        samples: Counter[tuple[str, str]] = Counter()
        for case, judged in outcomes.items():
            if judged.samples or judged.outcome != Outcome.EQUAL:
                counts[case.dtype, case.variant][judged.outcome] += 1
                samples[case.dtype, case.variant] += judged.samples
        for (dtype, variant), found in counts.items():
            by_outcome = {str(outcome): str(found[outcome]) for outcome in Outcome}
            number = {"samples": str(samples[dtype, variant])}
            rows.append({"schedule": schedule, "dtype": dtype, "variant": variant} | by_outcome | number)
    return rows


def _rows(sweep: Sweep) -> list[dict[str, str]]:
    """Return a row for each operator, variant and reason; dtypes and schedules that share it are in one."""
    shared: dict[tuple[str, str, Outcome, str], tuple[set[str], set[str]]] = {}
    for schedule, outcomes in sweep.items():
        for case, judged in outcomes.items():
            if judged.outcome != Outcome.EQUAL:
                key = case.operator, case.variant, judged.outcome, judged.reason
                dtypes, schedules = shared.setdefault(key, (set(), set()))
                dtypes.add(case.dtype)
                schedules.add(schedule)
    return [
        {
            "operator": operator,
            "variant": variant,
            "dtypes": ", ".join(sorted(dtypes)),
            "schedules": "all" if len(schedules) == len(sweep) else ", ".join(sorted(schedules)),
            "outcome": str(outcome),
            "reason": reason,
        }
        for (operator, variant, outcome, reason), (dtypes, schedules) in sorted(shared.items())
    ]
