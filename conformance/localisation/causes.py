"""First causes of another trainer's failures, in the words of its author: from formulas, places, crashes and hangs."""

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from conformance.localisation.equality import CLOSE
from conformance.localisation.formulas import NamedFormula, named_formulas
from conformance.localisation.hanging import is_suites_loop, waiting_ranks
from conformance.localisation.subject_run import BETWEEN_STEPS, SubjectRun
from conformance.outcomes import Failure
from conformance.plan.cells import Cell, cell_from_id
from conformance.report.causes import CellCause, FailedCase, in_causal_order
from conformance.report.location import Location
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns

_OF_NUMBERS = frozenset(["gradients", "bf16-gradients", "gradient-norm", "clipping", "parameters", "loss", "replicas"])
"""Laws of whose failures a wrong formula may be the cause."""
_HELD = "optimizer-holds-each-once"
_REDUCED = "gradients-are-reduced"
_BEFORE_FORMULAS = ("initial values", "resumed state", "data")
"""Stages before gradients, whose faults no formula explains."""


_IN_THEIR_WORDS = {
    "wire-dtypes": "FSDP communicates in other dtypes, or by other reductions",
    "same-collectives": "ranks issue different collectives",
}
"""Words for laws whose findings say more than that a tensor is wrong."""


class Causes(NamedTuple):
    """First cause of each cell, and the first error of the search."""

    found: list[CellCause]
    error: BaseException | None


def first_causes(
    store: RecordStore,
    failed: Mapping[str, Sequence[FailedCase]],
    locations: Mapping[str, Location],
    *,
    logs: Path,
    limit_s: float,
) -> Causes:
    """Return the first cause of each cell with failed cases, given their first wrong places.

    Output and stacks of runs that did not finish go into the directory `logs`. No run is made with a limit of 0, nor
    after it is over: the order of laws then decides alone.
    """
    until_s, error = time.monotonic() + limit_s, None
    found: dict[str, _Search] = {}
    for cell_id, cases in failed.items():
        search = _Search(
            SubjectRuns(store.within(max(1.0, limit_s))), cell_from_id(cell_id), cases, locations.get(cell_id)
        )
        found[cell_id] = search
        if time.monotonic() < until_s:
            try:
                search.look()
            except KeyboardInterrupt as interrupt:
                return Causes([each.cause(Counter(), logs) for each in found.values()], interrupt)
            except Exception as raised:
                error = error or raised
    votes = Counter(formula.id for search in found.values() for formula in search.formulas)
    return Causes([search.cause(votes, logs) for search in found.values()], error)


class _Search:
    """Search for the first cause of one cell."""

    def __init__(self, runs: SubjectRuns, cell: Cell, cases: Sequence[FailedCase], location: Location | None) -> None:
        self._runs, self._cell, self._location = runs, cell, location
        self._failure = runs.kept_failure(cell)
        self._first, *_ = in_causal_order(cases)
        self._reasons = {case.law: case.reason for case in cases}
        self._random = self._again = self._told_by_loop = ""
        self.formulas: list[NamedFormula] = []

    def look(self) -> None:
        """Look for a formula, for randomness, and for a gradient that is reduced again."""
        place = self._location
        if self._failure is not None or (place is not None and place.stage in _BEFORE_FORMULAS):
            return
        self._told_by_loop = _scaled_in_clipping(self._runs, self._cell) or _in_another_turn(self._runs, self._cell)
        if self._reasons.keys() & _OF_NUMBERS:
            self.formulas = named_formulas(self._runs, self._cell)
        if place is not None and place.stage == "forward":
            self._random = _randomness(self._runs, self._cell)
        if place is not None and place.stage in ("reduction", "clipping"):
            self._look_at_reduction(place)

    def _look_at_reduction(self, place: Location) -> None:
        """Tell a gradient that is reduced again, or else the line that calls backward, in which FSDP reduces."""
        run = SubjectRun(self._runs, self._cell)
        again = run.reduced_again(place) if not self.formulas else None
        line = run.line_of_sum(place) if again else run.line(place.step or 0, place.ranks[0], "backward")
        if again:
            self._again = again
        if again or (place.stage == "reduction" and place.called is None):
            self._location = replace(place, called=line)

    def cause(self, votes: Mapping[str, int], logs: Path) -> CellCause:
        """Return the cause; of several formulas the one with most votes, which those of all cells give."""
        if self._failure is not None:
            return self._ended(self._failure, logs)
        place = self._location
        where = _where(place) if place else ""
        if self._random:
            return CellCause(cell=self._cell.id, key="random", sentence=self._random, where=where)
        unfrozen = re.search(r"frozen in one process (?!none)(.*)", self._reasons.get(_HELD, ""))
        if unfrozen:
            told = f"{unfrozen[1]}: the optimizer holds what one process freezes, and requires_grad is True"
            return CellCause(cell=self._cell.id, key="unfrozen", sentence=told, where="")
        if self._told_by_loop:
            return CellCause(cell=self._cell.id, key=self._told_by_loop, sentence=self._told_by_loop, where=where)
        if self._has_formula(place):
            formula = max(self.formulas, key=lambda each: votes.get(each.id, 0))
            since = f", from step {formula.step} on" if formula.step else ""
            return CellCause(
                cell=self._cell.id,
                key=formula.id,
                sentence=formula.sentence + since,
                where=where if place and (place.step or 0) == formula.step else "",
            )
        if place is not None and place.stage not in ("trial", "memory"):
            sentence = self._again or self._told_of(place)
            key = f"{place.stage} {place.name} {place.quantity} {place.step}"
            return CellCause(cell=self._cell.id, key=key, sentence=sentence, where=where)
        key = f"{self._first.law} {self._first.reason.partition(':')[0]}"
        return CellCause(cell=self._cell.id, key=key, sentence=f"{self._first.law}: {self._first.reason}", where=where)

    def _has_formula(self, place: Location | None) -> bool:
        """Return whether there is a formula, and no place in an earlier step."""
        is_later = place is not None and self.formulas and (place.step or 0) < self.formulas[0].step
        return bool(self.formulas) and not is_later

    def _told_of(self, place: Location) -> str:
        if self._first.law in _IN_THEIR_WORDS and place.equals.startswith("is off by"):
            return f"{_IN_THEIR_WORDS[self._first.law]}: {self._first.reason.rpartition('; ')[2]}"
        told = _frozen(self._runs, self._cell, place) or self._copies(place) if place.equals == "is missing" else ""
        if place.stage == "optimizer":
            told = told or _learning_rate(self._runs, self._cell, place)
            told = told or SubjectRun(self._runs, self._cell).decayed(place)
        return told or self._unequal_buffer(place) or sentence_of(place) + self._more_about(place)

    def _copies(self, place: Location) -> str:
        """Return a sentence about a gradient that is not reduced over the ranks that hold copies of its shards."""
        if place.stage != "reduction" or not self._reasons.get(_REDUCED, "").startswith("elements in all_reduce"):
            return ""
        return (
            f"the gradient of {place.name} is reduced over the ranks that shard the parameter, and not over those that "
            "hold copies: was set_requires_all_reduce(False) called?"
        )

    def _unequal_buffer(self, place: Location) -> str:
        """Return a sentence about a buffer of the first wrong module that ranks have built unequally, if there is one.

        A buffer that is the same on all ranks has its own sentence.
        """
        found = re.search(r"initial/buffer/(\S+) on rank (\d+)", self._reasons.get("replicas", ""))
        if found is None or place.stage != "forward" or found[1].rpartition(".")[0] != place.name:
            return ""
        return f"{found[1]} differs from rank to rank when the model is built: nobody broadcasts this buffer"

    def _more_about(self, place: Location) -> str:
        """Return a clause about tensors that the optimizer holds instead, or about ranks that log other losses."""
        if place.equals.endswith("the optimizer does not hold the parameter"):
            found = re.search(r"(\d+) tensors that are no parameters", self._reasons.get(_HELD, ""))
            if found and int(found[1]):
                return (
                    f", and holds {found[1]} tensors that are no parameters: was it made before the model was sharded?"
                )
        is_logged = place.stage == "loss" and place.quantity == "loss that is logged"
        if is_logged and "different losses" in self._reasons.get("loss", ""):
            return ", and each rank logs another one: is their sum over ranks missing?"
        return ""

    def _ended(self, failure: Failure, logs: Path) -> CellCause:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{self._cell.id}.txt"
        log.write_text(failure.details)
        waiting = sorted(waiting_ranks(failure), key=lambda each: (each.code is None, bool(each.collective), each.rank))
        clauses = "; ".join(each.clause for each in waiting)
        reason = failure.reason
        if failure.kind == "timeout":
            sentence = f"the run hangs: {clauses or reason}"
        elif len({_call(each) for each in failure.collectives}) > 1 and any(
            each.rank == failure.first_rank and each.collective for each in waiting
        ):
            sentence = f"{reason}: ranks issue different collectives: {clauses}"
        else:
            sentence = f"did not run: {reason}"
        code = waiting[0].code if waiting else None
        return CellCause(
            cell=self._cell.id,
            key=f"{failure.kind} {_without_numbers(sentence)}",
            sentence=sentence,
            where=str(code) if code else "",
            traceback=failure.traceback if failure.kind != "timeout" else "",
            log=f"{logs.name}/{log.name}",
        )


def sentence_of(place: Location) -> str:
    """Return a first wrong place as the author of a trainer would tell it."""
    on = "" if place.ranks_text in ("all ranks", "the only rank") else f" on {place.ranks_text}"
    name, step = place.name or "the model", f" in step {place.step}" if place.step else ""
    match place.stage:
        case "initial values" if place.quantity == "initial value" and place.equals.startswith("not initialised"):
            return f"{name} is not initialised{on}: {place.equals.partition(': ')[2]}"
        case "initial values" if place.quantity == "initial value":
            return f"{name} does not begin with the weights of one process{on}: it {place.equals}"
        case "initial values" if place.quantity == "layout":
            return f"{name} is not sharded: it {place.equals}"
        case "initial values":
            return f"{name}: the {place.quantity} {place.equals}{on}"
        case "resumed state" if place.quantity not in ("restored parameter", "restored buffer"):
            state = place.quantity.removeprefix("restored ")
            return f"after loading, the optimizer's state {state} of {name} {place.equals}{on}"
        case "resumed state":
            return f"after loading, the {place.quantity} of {name} {place.equals}{on}"
        case "reduction" if "no call of fully_shard" in place.collective:
            return f"{name} is not sharded, {place.collective}, and its gradient is not reduced"
        case "reduction" if place.equals == "is missing" and "not issued" in place.collective:
            return (
                f"gradients are not reduced over the ranks in step {place.step or 0}: no reduce_scatter is issued; is "
                "gradient sync off in its last micro-batch?"
            )
        case "loss" if not place.name and place.quantity == "loss that is logged":
            return f"the loss that is logged {place.equals}{step}"
        case "loss":
            return f"the loss is scaled wrongly before backward{step}: {place.quantity} {_verb(place.equals)}"
        case "clipping" if place.quantity.startswith("total"):
            return f"gradients are clipped by a wrong norm{on}{step}: it {place.equals}"
        case "optimizer" if place.equals.startswith("is the value before the step"):
            why = place.equals.partition(": ")[2]
            return f"{name} is not updated{on}{step}{f': {why}' if why else ''}"
        case "parameters" if place.quantity == BETWEEN_STEPS:
            return (
                f"{name} is changed after the optimizer's step{on}: step {place.step} does not begin with the value "
                "that the optimizer has left"
            )
        case "parameters" if place.equals.startswith("is that of the step before"):
            return f"{name} is stale{on}{step}: the {place.quantity} {place.equals}"
    return f"{place.stage}{step}: {name}, {place.quantity}, {_verb(place.equals)}{on}"


def _verb(clause: str) -> str:
    """Return a clause about a value with a verb: `is 0.5 x expected`."""
    return f"is {clause}" if clause[:1].isdigit() else clause or "differs"


def _where(place: Location) -> str:
    called = place.called if place.called and not is_suites_loop(place.called.file) else ""
    return "; ".join(filter(None, [place.place, str(called)]))


def _frozen(runs: SubjectRuns, cell: Cell, place: Location) -> str:
    """Return a sentence about parameters that one process trains and that are frozen; empty if none is."""
    evidence = runs.evidence(cell)
    parameters, untrained = evidence.record.ranks[0].parameters, evidence.reference.facts.untrained
    frozen = [name for name, each in parameters.items() if not each.is_trained and name not in untrained]
    if place.name not in frozen:
        return ""
    frozen = [place.name, *(name for name in frozen if name != place.name)]
    others = f" and {len(frozen) - 1} more" if frozen[1:] else ""
    verb = "are" if frozen[1:] else "is"
    return f"{frozen[0]}{others} {verb} frozen: requires_grad is False, and one process trains them"


def _scaled_in_clipping(runs: SubjectRuns, cell: Cell) -> str:
    """Return a sentence about gradients that a loop clips before its `GradScaler` unscales them; empty if not."""
    scale = runs.evidence(cell).record.ranks[0].scale_in_clipping
    if scale == 1.0:
        return ""
    return (
        f"gradients are clipped while they are {scale:g} times too large: GradScaler unscales them afterwards; call "
        "scaler.unscale_(optimizer) before clipping"
    )


def _in_another_turn(runs: SubjectRuns, cell: Cell) -> str:
    """Return a sentence about steps, clipping or gradients in the turn of another optimizer; empty without any."""
    evidence = runs.evidence(cell)
    facts, expected = evidence.record.ranks[0], evidence.reference.facts.by_products
    if facts.out_of_turn:
        return facts.out_of_turn[0]
    others = [name for name in facts.by_products if name not in expected[0]]
    if not others:
        return ""
    return (
        f"{others[0]} and {len(others) - 1} more get a gradient in the first turn, of another network: are "
        "samples that one network makes detached before they are data of the other?"
    )


def _learning_rate(runs: SubjectRuns, cell: Cell, place: Location) -> str:
    """Return a sentence about a learning rate that is not that of one process in the step of a place; empty if it is.

    Groups of parameters are compared where both optimizers have as many.
    """
    evidence, step = runs.evidence(cell), place.step or 0
    measured = evidence.record.ranks[place.ranks[0]].learning_rates[step]
    expected = evidence.reference.facts.learning_rates[step]
    if len(measured) != len(expected):
        return ""
    for rate, declared in zip(measured, expected, strict=True):
        if abs(rate - declared) > CLOSE * abs(declared):
            return (
                f"the learning rate of step {step} is {rate:.6g}, and {declared:.6g} by the declared optimizer and "
                "schedule: does the schedule take one step after each step of the optimizer?"
            )
    return ""


def _randomness(runs: SubjectRuns, cell: Cell) -> str:
    """Return a sentence about a run whose loss depends on the seed of torch's generator; empty if it does not."""
    records = (runs.evidence(cell).record, runs.with_another_seed(cell))
    losses = [next((facts.losses[0] for facts in record.ranks if facts.losses), float("nan")) for record in records]
    if not abs(losses[0] - losses[1]) > CLOSE * abs(losses[0]):  # a loop may tell no losses
        return ""
    return (
        f"the parallel model is random and model() is not: two runs with different seeds have the losses "
        f"{losses[0]:.6g} and {losses[1]:.6g} in step 0; is dropout on?"
    )


def _call(collective: str) -> str:
    """Return kind, operation, size and dtype of a collective."""
    return collective.partition(" over ")[0]


def _without_numbers(text: str) -> str:
    return "".join("#" if character.isdigit() else character for character in text)
