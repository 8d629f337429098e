"""Wrong formulas that give the gradients of a run, or its clipped gradients, to within rounding."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from conformance.bound import Bound
from conformance.instruments.tensor_file import write_tensors
from conformance.localisation.equality import CLOSE, deviation
from conformance.localisation.shards import assembled
from conformance.localisation.states import Shards, shards_of
from conformance.localisation.unequal_clipping import added_norms, partial_norms, unequal_factors
from conformance.oracles.reference import clip_factor, total_norm
from conformance.plan.cells import Cell
from conformance.subjects.evidence import Evidence, SubjectRecord
from conformance.subjects.formulas import FACTS_FILE, TENSORS_FILE, Formula, StepFormulas, StepTerms
from conformance.subjects.running import SubjectRuns

_ORDERS = (1.0, math.inf)
"""Orders of other norms than the 2-norm, by which gradients may have been clipped."""


class NamedFormula(NamedTuple):
    """Formula that a run has computed in place of the right one."""

    id: str
    """Name that the formula has on all cells."""
    sentence: str
    step: int


def named_formulas(runs: SubjectRuns, cell: Cell) -> list[NamedFormula]:
    """Return the formulas that give the first wrong gradients of a cell, or else its first wrong clipped gradients.

    Of several with the same result in that step, those that fit most of the wrong steps. Raises CellFailed if the
    cell's run did not finish.
    """
    evidence = runs.evidence(cell)
    by_step = [_in_step(evidence, formulas, step) for step, formulas in enumerate(_formulas(runs, cell, evidence))]
    wrong = [found for found in by_step if found is not None]
    votes = Counter(each.id for found in wrong for each in found)
    return [each for each in wrong[0] if votes[each.id] == max(votes[e.id] for e in wrong[0])] if wrong else []


def _in_step(evidence: Evidence, formulas: StepFormulas, step: int) -> list[NamedFormula] | None:
    """Return the formulas that the gradients of a step, or else the clipped ones, are; None if they are right."""
    if not _agree(evidence, formulas, step):
        return _for_gradients(evidence, formulas, step)
    return list(_for_clipping(evidence, formulas, step)) or None


def _formulas(runs: SubjectRuns, cell: Cell, evidence: Evidence) -> list[StepFormulas]:
    """Return the formulas by step, from the run's own weights before each."""
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.safetensors"
        write_tensors(weights, weights_by_step(evidence.record, evidence.reference.facts.aliases))
        made = runs.terms(cell, weights=weights, record=evidence.record.directory)
    terms = load_file(made / TENSORS_FILE)
    facts = msgspec.msgpack.decode((made / FACTS_FILE).read_bytes(), type=list[StepTerms])
    return [StepFormulas(terms, each, step=step) for step, each in enumerate(facts)]


def weights_by_step(record: SubjectRecord, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the full weights with which each step of a run began, by `stepN/NAME`."""
    return {
        f"step{step}/{aliases.get(name, name)}": tensor
        for step in range(len(record.cell.accumulation))
        for name, tensor in assembled(record, f"step{step}/parameter/").items()
    }


def _for_gradients(evidence: Evidence, formulas: StepFormulas, step: int) -> list[NamedFormula]:
    """Return the formulas that wrong gradients are; none if one is missing."""
    measured = [_gradients(evidence, step, rank) for rank in range(evidence.record.world_size)]
    if any(formulas.right.keys() - own.keys() for own in measured):
        return []
    shards = evidence.cell.shape["dp_shard"]
    turns = evidence.reference.facts.turns
    before = assembled(evidence.record, f"step{step - turns}/clipped/") if step >= turns else {}
    found = []
    for formula in formulas.all(shards=shards, before=before, limit=evidence.reference.facts.max_norm):
        factor = _factor(evidence, measured, formula, bounds=_bounds(evidence, step % turns))
        if factor is None:
            continue
        within = max(CLOSE, *(each.value for each in _bounds(evidence, step % turns).values()))
        told = list(_told(formulas, formula, factor, within=within))
        found += [NamedFormula(id_, f"your gradients are {sentence}", step) for id_, sentence in told]
    return found or list(_with_decay(evidence, formulas, measured, step))


def _with_decay(
    evidence: Evidence, formulas: StepFormulas, measured: Sequence[Shards], step: int
) -> Iterator[NamedFormula]:
    """Yield a formula if wrong gradients are the right ones and one multiple of the weights before the step."""
    rates = []
    for rank, own in enumerate(measured):
        weights = evidence.record.shards_below(f"step{step}/parameter/", rank=rank)
        for name, expected in shards_of(evidence.record, formulas.right, rank).items():
            if deviation(own[name], expected) <= _bounds(evidence, step)[name].value:
                continue
            added, weight = own[name].double() - expected.double(), weights[name].double()
            rates.append(float((added * weight).sum() / weight.square().sum()))
            if not deviation(added, weight * rates[-1]) <= CLOSE:
                return
    if rates and _are_close(rates, [rates[0]] * len(rates)):
        told = (
            f"your gradients are those of the mean and {rates[0]:.4g} times the weights: weight decay is added to them"
        )
        yield NamedFormula("weight-decay", told, step)


def _told(formulas: StepFormulas, formula: Formula, factor: float, *, within: float) -> Iterator[tuple[str, str]]:
    """Yield id and words of a formula with each name of its factor, of which rounding explains a deviation `within`."""
    if formula.has_factor != "one":
        yield formula.id, f"those of {formula.sentence}"
        return
    close = [each for each in formulas.factors() if math.isclose(factor, each[1], rel_tol=within)]
    divisor = formulas.facts.total / factor
    close = close or [("number", factor, f"{factor:.6g} times as large: the sum is divided by {divisor:.6g}")]
    for name, _, clause in close:
        if formula.id != "mean":
            yield f"{formula.id} {name}".strip(), f"those of {formula.sentence}{f', {clause}' if clause else ''}"
        elif clause:
            yield name, clause


def _agree(evidence: Evidence, formulas: StepFormulas, step: int) -> bool:
    """Return whether all gradients of a step are right."""
    bounds = _bounds(evidence, step)
    for rank in range(evidence.record.world_size):
        own = _gradients(evidence, step, rank)
        for name, expected in shards_of(evidence.record, formulas.right, rank).items():
            if name not in own or deviation(own[name], expected) > bounds[name].value:
                return False
    return True


def _bounds(evidence: Evidence, step: int) -> Mapping[str, Bound]:
    errors = evidence.reference.facts.bf16_gradients
    if evidence.cell.precision == "fp32" or errors is None:
        return evidence.reference.gradient_bounds(step)
    return evidence.reference.bf16_bounds(errors)


def _gradients(evidence: Evidence, step: int, rank: int, *, kind: str = "gradient") -> Shards:
    return evidence.record.shards_below(f"step{step}/{kind}/", rank=rank)


def _factor(
    evidence: Evidence, measured: Sequence[Shards], formula: Formula, *, bounds: Mapping[str, Bound]
) -> float | None:
    """Return the factor by which measured gradients are a multiple of a formula's; None if they are none.

    Terms begin with the weights of the run, so that `bounds` are those of the first step, or of the first such turn.
    """
    record, factors = evidence.record, []
    data_ranks = [facts.data_rank for facts in record.ranks]
    expected = [shards_of(record, formula.by_rank[data_rank], rank) for rank, data_rank in enumerate(data_ranks)]
    if formula.has_factor == "one":
        factors = [_multiple(measured, expected)] * len(measured)
    else:
        factors = [
            1.0 if formula.has_factor == "no" else _multiple([m], [e]) for m, e in zip(measured, expected, strict=True)
        ]
    for own, wanted, factor in zip(measured, expected, factors, strict=True):
        if not factor or not math.isfinite(factor):
            return None
        for name, tensor in wanted.items():
            if not deviation(own[name], tensor * factor) <= max(bounds[name].value, CLOSE):
                return None
    return factors[0]


def _multiple(measured: Sequence[Shards], expected: Sequence[Shards]) -> float:
    """Return the number by which expected tensors, all together, must be multiplied; 0 if they are other ones."""
    product = size = 0.0
    for own, wanted in zip(measured, expected, strict=True):
        for name, tensor in wanted.items():
            if own[name].shape != tensor.shape:
                return 0.0
            product += float((own[name].double() * tensor.double()).sum())
            size += float(tensor.double().square().sum())
    return product / size if size else 0.0


def _for_clipping(evidence: Evidence, formulas: StepFormulas, step: int) -> Iterator[NamedFormula]:
    """Yield the formula by whose factor, or factors of some parameters, gradients are scaled wrongly."""
    record, limit = evidence.record, evidence.reference.facts.max_norm
    ranks = range(record.world_size)
    before, after = (
        [_gradients(evidence, step, rank, kind=kind) for rank in ranks] for kind in ("gradient", "clipped")
    )
    if any(b.keys() != a.keys() for b, a in zip(before, after, strict=True)) or not before[0]:
        return
    factors = [_multiple([a], [b]) for a, b in zip(after, before, strict=True)]
    if any(
        deviation(a[name], b[name] * factor) > CLOSE
        for b, a, factor in zip(before, after, factors, strict=True)
        for name in b
    ):
        full = (assembled(record, f"step{step}/{kind}/") for kind in ("gradient", "clipped"))
        yield from (NamedFormula(*told, step) for told in unequal_factors(*full, limit=limit))
        return
    norm = total_norm(assembled(record, f"step{step}/gradient/").values(), order=2.0)
    factor = clip_factor(norm, max_norm=limit)
    if _are_close(factors, [factor] * len(factors)):
        return
    own = [total_norm(each.values(), order=2.0) for each in before]
    if _are_close(factors, [1.0] * len(factors)):
        told = f"gradients are not clipped: their norm is {norm:.4g}, the limit {limit:.4g}"
        yield NamedFormula("not-clipped", told, step)
    elif _are_close(factors, [factor**2] * len(factors)):
        yield NamedFormula("clipped-twice", "gradients are clipped twice, by the same norm each time", step)
    elif _is_local(factors, own, limit=limit):
        norms = ", ".join(f"{each:.4g}" for each in dict.fromkeys(own))
        told = f"each rank clips by the norm of its own shards ({norms}), not by that of all gradients ({norm:.4g})"
        yield NamedFormula("local-norm", told, step)
    else:
        for id_, sentence, each in _norms(evidence, formulas, step, norm):
            if _are_close(factors, [clip_factor(value, max_norm=limit) for value in each]):
                yield NamedFormula(id_, sentence, step)


def _is_local(factors: Sequence[float], norms: Sequence[float], *, limit: float) -> bool:
    """Return whether ranks have scaled by different factors, each by its own norm to the limit, or to another one."""
    if _are_close(factors, [clip_factor(norm, max_norm=limit) for norm in norms]):
        return True
    products = [factor * norm for factor, norm in zip(factors, norms, strict=True)]
    return not _are_close(factors, [factors[0]] * len(factors)) and _are_close(products, [products[0]] * len(products))


def _norms(
    evidence: Evidence, formulas: StepFormulas, step: int, norm: float
) -> Iterator[tuple[str, str, list[float]]]:
    """Yield id, sentence and norm by rank of ways in which a norm may have been computed."""
    cell, record = evidence.cell, evidence.record
    for noun, count in _repetitions(cell.shape, cell.world_size).items():
        told = f"gradients are clipped by a norm that is sqrt({count}) times too large: each counts on {noun}"
        yield "norm-of-copies", told, [norm * math.sqrt(count)] * cell.world_size
    told = "each rank clips by the norm that its gradients had before they were reduced over the ranks"
    yield "norm-before-reduction", told, [formulas.own_norm(facts.data_rank) for facts in record.ranks]
    gradients = assembled(record, f"step{step}/gradient/")
    for order in _ORDERS:
        other = total_norm(gradients.values(), order=order)
        yield f"{order:g}-norm", f"gradients are clipped by their {order:g}-norm", [other] * cell.world_size
    by_ranks: dict[str, list[str]] = {}
    for name, parameter in record.ranks[0].parameters.items():
        by_ranks.setdefault(str(parameter.shard_ranks), []).append(name)
    for id_, told, other in (*partial_norms(gradients), *added_norms(gradients, list(by_ranks.values()))):
        yield id_, told, [other] * cell.world_size


def _repetitions(shape: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the number of ranks on which a norm may count the same gradient, by a noun for them."""
    copies, tensor_parallel = shape.get("dp_replicate", 1), shape.get("tp", 1)
    found = {
        f"the {copies} ranks that hold copies": copies,
        f"the {tensor_parallel} tensor-parallel ranks": tensor_parallel,
        f"all {world_size} ranks": world_size,
    }
    return {noun: count for noun, count in found.items() if count > 1}


def _are_close(measured: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(m, e, rel_tol=CLOSE) for m, e in zip(measured, expected, strict=True))
