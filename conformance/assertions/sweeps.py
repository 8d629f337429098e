"""Judgement of sweeps: a wrong result fails, and a call that no measured release of torch refused."""

from collections.abc import Sequence

import torch

from conformance.assertions import compare
from conformance.judge.measurements import measure
from conformance.outcomes import SWEPT_OUTCOMES, swept_metric
from conformance.sweeps.refusals import BOUNDED, COMMUNICATING, REFUSED, newly_communicating, newly_refused
from conformance.sweeps.trials import Swept


def require_no_wrong_result(ranks: Sequence[Swept], *, unit: str, bounded: str = "") -> None:
    """Fail on the first wrong result, and on a subject that was not tried; record how many calls each subject refused.

    `bounded` is a case, `LAW/CELL`: then a subject also fails that refuses more calls, or with another error, than the
    case did on the measured releases of torch, or of which more calls communicate, see `sweeps.refusals`.

    Raises ConformanceFailure with the fault, and RuntimeError if nothing has computed and nothing is wrong.

    >>> refusing = Swept(computed={"mean": 1}, refused={"mean": 3})
    >>> require_no_wrong_result([refusing, refusing], unit="calls")
    """
    __tracebackhide__ = True
    first = ranks[0]
    if not any(first.computed.values()) and not any(swept.wrong for swept in ranks):
        raise RuntimeError(f"nothing has computed in any of the {unit}")
    for outcome in SWEPT_OUTCOMES:
        measure(swept_metric(outcome), first.outcomes.get(outcome, 0), kind="exact", unit=unit)
    for subject, refused in first.refused.items():
        if refused:
            tried = f"of {refused + first.computed[subject]} {unit}"
            measure(f"{subject}: refused", refused, kind="exact", unit=unit, at=tried)
    wrong = {each.name: each for swept in reversed(ranks) for each in swept.wrong}
    faulty = {each.subject for each in wrong.values()}
    reached = faulty | {subject.partition("(")[0] for subject in faulty}  # of whose options some are wrong
    cases = {f"{subject}: wrong": 0 for subject in first.computed if subject not in faulty}
    cases |= {name: each.cases for name, each in wrong.items()}
    details = {name: each.example for name, each in wrong.items()}
    for subject, computed in first.computed.items():
        if not computed + first.refused.get(subject, 0) and subject not in reached:
            cases[f"{subject}: not tried"], details[f"{subject}: not tried"] = 1, "it has neither computed nor refused"
    if bounded:
        _record_bounded_calls(first, unit)
        version = torch.__version__
        for subject, calls, text in newly_refused(bounded, first.errors, version):
            cases[f"{subject}: newly refused"], details[f"{subject}: newly refused"] = calls, text
        for subject, calls, text in newly_communicating(bounded, first.communicating, first.errors, version):
            name = f"{subject}: newly communicating"
            cases[name], details[name] = calls, text
    compare.none(cases, details=details, unit=unit)


def _record_bounded_calls(swept: Swept, unit: str) -> None:
    """Record refused calls by error, those that communicate by pass, and that there are no others."""
    tables = ((REFUSED, swept.errors), (COMMUNICATING, swept.communicating))
    for separator, counts in tables:
        for subject, numbers in counts.items():
            for text, calls in numbers.items():
                measure(f"{BOUNDED}{subject}{separator}{text}", calls, kind="exact", unit=unit)
    measure(f"{BOUNDED}all subjects", sum(swept.refused.values()), kind="exact", unit=f"refused {unit}")
