"""First wrong tensor of a step as a location: the module, and the value and the collective that explain it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.instruments.facts import Collective
from conformance.instruments.taps import Tap
from conformance.localisation.equality import CLOSE, deviation, elements_clause, equals_clause
from conformance.localisation.lines import line_of
from conformance.localisation.walk import Compared, ComparedStep, container, parent
from conformance.report.location import Code, Family, Location, Stage

_GRADIENTS = ("output gradient", "input gradient")


@dataclass(frozen=True)
class Named:
    """Name of a wrong place."""

    stage: Stage
    name: str
    quantity: str


def first_wrong_tensor(
    step: ComparedStep, *, sizes: Mapping[str, float], collectives: Sequence[Sequence[Collective]]
) -> Location | None:
    """Return the first tapped tensor of a step that is wrong; None if all are right.

    `sizes` are numbers by name that a ratio may equal, `collectives` those of each rank in the order of issue.
    """
    wrong = step.wrong
    if not wrong:
        return None
    first = wrong[0]
    same = [each for each in wrong if each.tap.place == first.tap.place]
    ranks = sorted({each.rank for each in same})
    named = _named(step, first)
    oracle = step.oracle(first.rank)
    family: Family = "dtype" if _is_rounded(first) else "tensor"
    marks = step.marks()
    marks[named.name if named.name in marks else parent(named.name)] = "wrong"
    return step.ranks.location(
        ranks,
        family=family,
        stage=named.stage,
        name=named.name,
        quantity=named.quantity,
        step=step.step,
        micro_batch=first.tap.call,
        module_class=oracle.modules.get(named.name, ""),
        equals=_equals(step, first, sizes) if family == "tensor" else _dtypes(step, first),
        agrees=_agrees(step, first, named),
        collective=_collective_clause(step, first, collectives),
        elements=_elements(first, within=_within(step, first)) if family == "tensor" else "",
        called=line_of(step, first, named.stage, named.name),
        issued=_issued(step, first),
        tree=marks,
    )


def _is_rounded(first: Compared) -> bool:
    """Return whether a tensor of another dtype is off by no more than a rounding to 16 bits."""
    return first.is_of_other_dtype and first.deviation < torch.finfo(torch.bfloat16).eps


def _named(step: ComparedStep, first: Compared) -> Named:
    tap, oracle = first.tap, step.oracle(first.rank)
    again = ", in the forward pass that backward repeats" if tap.is_recomputed else ""
    match tap.kind:
        case "parameter" | "parameter in backward":
            gathered = "again for backward" if tap.kind == "parameter in backward" else "for forward"
            return Named("parameters", f"{tap.module}.{tap.item}", f"value gathered {gathered}{again}")
        case "parameter gradient":
            return Named("backward", f"{tap.module}.{tap.item}", "gradient of one micro-batch, before its reduction")
        case "output":
            return Named("forward", tap.module, f"output{again}")
        case "input":
            return _named_input(tap, again)
    known = oracle.taps[oracle.index[(*tap.place[:-1], False)]]
    users = [each.module for each in oracle.consumers.get(known.value, ())]
    if not users:
        return Named("loss", "", "gradient of the model's output, with which backward begins")
    name = container(users)
    if name in users:
        return Named("backward", name, "gradient of its input")
    return Named("backward", name, f"gradient of the input of {' and '.join(users)}")


def _named_input(tap: Tap, again: str) -> Named:
    if not tap.module:
        return Named("data", "", "input of the model")
    if parent(tap.module) in ("", "layers"):
        return Named("forward", tap.module, f"its input {tap.item}{again}")
    return Named("forward", parent(tap.module), f"input {tap.item} of its module {tap.module}{again}")


def _equals(step: ComparedStep, first: Compared, sizes: Mapping[str, float]) -> str:
    if first.expected is None:
        return f"has shape {tuple(first.measured.shape)}, which is no shard of the expected tensor"
    clause = _sum_clause(step, first) or equals_clause(
        first.measured, first.expected, sizes=sizes, others=dict(_others(step, first))
    )
    return clause or f"is off by {first.deviation:.2g} of its size"


def _dtypes(step: ComparedStep, first: Compared) -> str:
    oracle = step.oracle(first.rank)
    known = oracle.taps[oracle.index[(*first.tap.place[:-1], False)]].dtype
    expected = step.expected.dtypes_at(step.ranks.data_ranks[first.rank], first.tap, known)
    return f"is {first.tap.dtype}, expected {' or '.join(expected)}"


def _sum_clause(step: ComparedStep, first: Compared) -> str:
    """Return a clause if the terms of the tensor-parallel ranks add up to the expected tensor."""
    group = [held.tensor for held in step.group(first.rank, first.tap)]
    assert first.expected is not None
    if len(group) < 2 or any(tensor.shape != first.expected.shape for tensor in group):
        return ""
    total = sum(group[1:], group[0])
    if deviation(total, first.expected) > max(CLOSE, _within(step, first)):
        return ""
    return f"is a partial sum: those of the {len(group)} tensor-parallel ranks add up to the expected tensor"


def _others(step: ComparedStep, first: Compared) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a wrong tensor may equal: those of other data, micro-batches and steps."""
    tap, own = first.tap, step.ranks.data_ranks[first.rank]
    place = (*tap.place[:-1], False)
    for data_rank, trace in enumerate(step.expected.traces):
        other = trace.tensor(place)
        if data_rank != own and other is not None and _differ(other, first.expected):
            yield f"that of the data of rank {step.ranks.data_ranks.index(data_rank)}", other
    for call in range(tap.call):
        other = step.oracle(first.rank).tensor((*place[:4], call, False))
        if other is not None:
            yield f"that of micro-batch {call}", other
    earlier = step.traces[first.rank].tensor((tap.step - 1, *place[1:]))
    if earlier is not None:
        yield "that of the step before", earlier


def _within(step: ComparedStep, first: Compared) -> float:
    return step.expected.within_at(step.ranks.data_ranks[first.rank], first.tap)


def _differ(other: Tensor, expected: Tensor | None) -> bool:
    return expected is not None and other.shape == expected.shape and deviation(other, expected) > CLOSE


def _agrees(step: ComparedStep, first: Compared, named: Named) -> str:
    """Return a clause about the tensors from which the wrong one is computed."""
    before = [
        each
        for each in step.compared
        if each.rank == first.rank
        and each.index < first.index
        and (each.tap.module == named.name or each.tap.module.startswith(f"{named.name}.") or not named.name)
        and (each.tap.kind in _GRADIENTS) == (first.tap.kind in _GRADIENTS)
    ]
    if not before:
        return ""
    largest = max((each.deviation for each in before if math.isfinite(each.deviation)), default=math.inf)
    if largest == math.inf:
        return ""
    return f"its inputs agree {'in every bit' if largest == 0.0 else f'to {largest:.1g}'}"


def _collective_clause(step: ComparedStep, first: Compared, collectives: Sequence[Sequence[Collective]]) -> str:
    """Return a clause about the collectives between the tensor before and the wrong one, on the first wrong rank."""
    if first.tap.kind in ("parameter", "parameter in backward"):
        return _gathering_clause(step, first, collectives)
    between = _between(step, first, collectives)
    if "partial sum" in _sum_clause_or_empty(step, first):
        issued = [each for each in between if each.kind in ("all_reduce", "reduce_scatter")]
        told = "issued, and its result not used" if issued else "not issued"
        return f"the collective that should be between: all_reduce over tp, {told}"
    names = list(dict.fromkeys(f"{each.kind} over {each.group}" for each in between))
    return f"between them: {', '.join(names)}" if names else ""


def _gathering_clause(step: ComparedStep, first: Compared, collectives: Sequence[Sequence[Collective]]) -> str:
    """Return a clause about the last collective that can have gathered a parameter before it was tapped."""
    before = collectives[first.rank][: first.tap.collectives]
    gathers = [each for each in before if each.kind == "all_gather" and each.group != "tp"]
    if not gathers or gathers[-1].step != step.step:
        return "gathered by no collective of this step"
    told = gathers[-1]
    during = f" for {told.during}" if told.during else ""
    return f"gathered by all_gather over {told.group}{during}"


def _sum_clause_or_empty(step: ComparedStep, first: Compared) -> str:
    return _sum_clause(step, first) if first.expected is not None else ""


def _between(step: ComparedStep, first: Compared, collectives: Sequence[Sequence[Collective]]) -> Sequence[Collective]:
    trace = step.traces[first.rank]
    start = trace.taps[first.index - 1].collectives if first.index else 0
    return collectives[first.rank][start : first.tap.collectives]


def _issued(step: ComparedStep, first: Compared) -> Code | None:
    trace = step.traces[first.rank]
    start = trace.taps[first.index - 1].collectives if first.index else 0
    lines = trace.issued[start : first.tap.collectives]
    return trace.code(lines[-1]) if lines else None


def _elements(first: Compared, *, within: float) -> str:
    return "" if first.expected is None else elements_clause(first.measured, first.expected, within=within)
