"""Findings of a law that are places already: a race of streams, a changed tensor, a trial of a sweep, a metric.

No further run is made: races and changed tensors are in the results that the law has judged, other findings in the
metrics and the reason of the failed case.
"""

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten

from conformance.experiments.training import train_with_delays
from conformance.instruments.facts import IssuedOperator, UnorderedOperators
from conformance.judge.measurements import Measurement, margin_of
from conformance.localisation.ranks import ranks_of
from conformance.plan.cells import Cell
from conformance.report.location import Code, Family, Location, Stage
from conformance.run.case_runs import CaseRuns

_FRAME = re.compile(r"(?P<file>.+):(?P<line>\d+) (?P<function>.+)")
_RANK = re.compile(r"\brank (\d+)")
_TRIAL = re.compile(r"\{'(rank \d+: )?(?P<trial>[^']+)'")
"""First entry of a table of trials, as a law prints it."""
_MOST_TOLD = 240
"""Most characters of a law's detail."""
_FSDP = "/_fully_shard/"


def race(cell: Cell, runs: CaseRuns) -> Location | None:
    """Return the first pair of operators on different streams that nothing orders; None without one."""
    record = runs.run(cell)
    pairs = {facts.rank: facts.streams.unordered for facts in record.ranks if facts.streams and facts.streams.unordered}
    if not pairs:
        return None
    pair = _nearest(pairs[min(pairs)])
    relation = "may be given the memory of" if pair.reused else "accesses the same memory as"
    first = f"{pair.first.operator} on {pair.first.stream}{_inside(pair.first)}"
    return ranks_of(record).location(
        [*pairs],
        family="race",
        stage="schedule",
        name="",
        quantity=f"{pair.second.operator} on {pair.second.stream}{_inside(pair.second)}",
        equals=f"{relation} {first}, and no event orders them",
        called=_code(pair.second),
        issued=_code(pair.first),
    )


def _nearest(pairs: Sequence[UnorderedOperators]) -> UnorderedOperators:
    """Return the pair of the first pair's second operator whose first operator was issued last.

    If that wait is missing, so is the order after all earlier operators, which have come before it in their turn.
    """
    second = pairs[0].second
    return [pair for pair in pairs if (pair.second.operator, pair.second.stack) == (second.operator, second.stack)][-1]


def changed_by_delays(cell: Cell, runs: CaseRuns) -> Location | None:
    """Return the first captured tensor that differs when operators are delayed; None if all are equal."""
    record = runs.run(cell)
    for facts, delayed in zip(record.ranks, runs.measure(train_with_delays, cell), strict=True):
        for operators, fingerprints in delayed.items():
            changed = [key for key, value in facts.fingerprints.items() if fingerprints.get(key, value) != value]
            if changed:
                when, kind, name = (*changed[0].split("/", 2), "", "")[:3]
                return ranks_of(record).location(
                    [facts.rank],
                    family="race",
                    stage="schedule",
                    name=name,
                    quantity=f"{kind} of {when}",
                    equals=f"differs with delayed operators ({operators}), which are used before they are complete",
                    elements=f"{len(changed)} of {len(facts.fingerprints)} tensors differ" if len(changed) > 1 else "",
                )
    return None


def own_finding(cell: Cell, measured: Mapping[str, Measurement], reason: str) -> Location | None:
    """Return the subject and the trial, or the metric, with which a law has failed; None if no metric is out of bounds.

    Of a sweep the metric's name begins with the subject: an operator, an option of `fully_shard`, a plan of a module.
    """
    wrong = {name: each for name, each in measured.items() if margin_of(each) > 1.0}
    if not wrong:
        return None
    metric, found = next(iter(wrong.items()))
    told = found.at or reason.partition("; ")[2].partition("\n")[0]
    name, trial = _subject(metric, told)
    numbers = {int(number) for number in _RANK.findall(told)}
    ranks = sorted(number for number in numbers if number < cell.world_size) or [*range(cell.world_size)]
    family: Family = "memory" if found.kind == "memory" else "trial"
    stage: Stage = "memory" if found.kind == "memory" else "trial"
    return Location(
        case="",
        cell="",
        family=family,
        stage=stage,
        name=name,
        quantity=trial,
        ranks=ranks,
        ranks_text="all ranks" if len(ranks) == cell.world_size else f"ranks {', '.join(map(str, ranks))}",
        equals=_numbers(found),
        elements=shorten(told, _MOST_TOLD, placeholder=" ..."),
    )


def _subject(metric: str, told: str) -> tuple[str, str]:
    """Return the subject and the trial of a metric: the part after a colon, else the first trial of a table of them."""
    subject, _, trial = metric.partition(": ")
    listed = _TRIAL.match(told)
    if listed:
        return metric, listed["trial"]
    return (subject, trial) if trial else ("", metric)


def _numbers(found: Measurement) -> str:
    value = "not finite" if found.value is None else f"{found.value:g}"
    if found.lower is not None and found.lower == found.upper:
        return f"{value} {found.unit}, expected {found.upper:g}"
    lower, upper = ("any" if bound is None else f"{bound:g}" for bound in (found.lower, found.upper))
    return f"{value} {found.unit}, not from {lower} to {upper}"


def _inside(issued: IssuedOperator) -> str:
    """Return the function that issued an operator as a clause; empty if it is not known."""
    code = _code(issued)
    return f" in {code.function}" if code else ""


def _code(issued: IssuedOperator) -> Code | None:
    frames = [frame for frame in issued.stack if _FSDP in frame] or list(issued.stack)
    match = _FRAME.fullmatch(frames[0]) if frames else None
    return Code(file=match["file"], line=int(match["line"]), function=match["function"]) if match else None
