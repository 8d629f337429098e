"""Outcomes of a sweep as text and in markdown: counts, and a row for each operator that is not equal."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from tabulate import tabulate

from conformance.sim_runs.operators.cases import Case, Judged, Outcome
from conformance.sim_runs.operators.reasons import Reasons, read_reasons

Sweep = Mapping[str, Mapping[Case, Judged]]
"""Outcomes by schedule and case."""
_NEW = "none"
"""In place of a reason, where reasons.yaml has none."""
_HEAD = """# Operators on the simulated device

`python -m conformance sim operators --write` has written this page, with torch {torch}.

It calls each operator of torch's own database with all its samples on `sim` and on the CPU. Results are equal if every
bit, dtype, shape and stride is, of outputs and gradients. A case is an operator, a dtype and a variant: the function
(with its gradients), the method, in place, with `out=`, a write into its views, and under autocast to bfloat16.

Strides of dimensions with one element, and of empty tensors, mean nothing and are not compared. A case that ends its
process is called again in a fresh one: kernels of the CPU that write out of bounds end it later, in another operator.
"""


def has_problems(sweep: Sweep) -> bool:
    """Return whether an operator is not equal without a reason that reasons.yaml has."""
    reasons = read_reasons()
    return any(
        judged.outcome != Outcome.EQUAL and reasons.row(case, judged.outcome) is None
        for outcomes in sweep.values()
        for case, judged in outcomes.items()
    )


def as_text(sweep: Sweep) -> str:
    """Return the counts, and the operators that are not equal, for a terminal."""
    return "\n\n".join(
        [_table(_counts(sweep), "simple"), _table(_reasons(sweep), "simple"), _table(_rows(sweep), "simple")]
    )


def as_markdown(sweep: Sweep) -> str:
    """Return the content of docs/sim/operators.md, without its last newline."""
    rows = [{key: text.replace("|", "/") for key, text in row.items()} for row in _rows(sweep)]
    for row in rows:
        row["seen"] = f"`{row['seen'].replace('`', '')}`"
    tables = [_table(_counts(sweep), "github"), _table(_reasons(sweep), "github"), _table(rows, "github")]
    return "\n".join([_HEAD.format(torch=torch.__version__), "\n\n".join(tables)])


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


def _reasons(sweep: Sweep) -> list[dict[str, str]]:
    """Return a row for each reason, with the number of its cases under each schedule."""
    reasons = read_reasons()
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for schedule, outcomes in sweep.items():
        for case, judged in outcomes.items():
            if judged.outcome != Outcome.EQUAL:
                counts[_reason(reasons, case, judged)][schedule] += 1
    return [
        {"reason": name, "is about": reasons.reasons.get(name, ""), "why": why}
        | {f"{schedule} cases": str(found[schedule]) for schedule in sweep}
        for (name, why), found in sorted(counts.items())
    ]


def _reason(reasons: Reasons, case: Case, judged: Judged) -> tuple[str, str]:
    row = reasons.row(case, judged.outcome)
    return (row.reason, row.why) if row else (_NEW, "")


def _rows(sweep: Sweep) -> list[dict[str, str]]:
    """Return a row for each operator, variant and difference; dtypes and schedules that share it are in one."""
    reasons = read_reasons()
    shared: dict[tuple[str, str, Outcome, str, str], tuple[set[str], set[str]]] = {}
    for schedule, outcomes in sweep.items():
        for case, judged in outcomes.items():
            if judged.outcome != Outcome.EQUAL:
                name, _ = _reason(reasons, case, judged)
                key = case.operator, case.variant, judged.outcome, name, judged.reason
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
            "seen": seen,
        }
        for (operator, variant, outcome, reason, seen), (dtypes, schedules) in sorted(shared.items())
    ]
