"""Run with taps, of any trainer: the stages in their order, each compared with the result that its inputs imply.

A subclass knows the trainer's oracles. Gradients are clipped, and parameters updated, from the tensors that the run
itself had before, so that a fault of an earlier place does not count again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from conformance.bound import Bound
from conformance.instruments.facts import Collective
from conformance.instruments.taps import COLLECTIVE, Tap
from conformance.localisation import states
from conformance.localisation.collectives import WrongCollective, wrong_collectives
from conformance.localisation.expected import ExpectedStep
from conformance.localisation.layouts import is_partial
from conformance.localisation.ranks import Ranks
from conformance.localisation.shards import assembled
from conformance.localisation.states import Shards, WrongState, shards_of, wrong_shards
from conformance.localisation.tensors import first_wrong_tensor
from conformance.localisation.traces import Trace, read_trace
from conformance.localisation.walk import ComparedStep
from conformance.oracles.reference import clip_factor, total_norm
from conformance.report.location import Code, Location, Mark, Stage
from conformance.run.shards import CapturedShards


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Options of clipping, and the relative deviations that rounding can explain."""

    order: float
    max_norm: float
    norm_within: float
    gradients_within: Mapping[str, Bound]


@dataclass(frozen=True, kw_only=True)
class Update:
    """Step of the optimizer: the tensors of a kind before it and those that it should leave, by rank."""

    kind: str
    """`parameter`, or a kind of optimizer state."""
    before: str
    """Prefix of the keys of the tensors before the step, `WHEN/KIND/`."""
    after: str
    """Prefix of the keys of the tensors after the step."""
    expected: Sequence[Shards]
    within: Mapping[str, Bound] | None = None
    """Relative deviation by tensor; None if no bit may differ."""
    by_shard: Sequence[Shards] = ()
    """Tensors that the optimizer makes of each rank's shards alone, by rank, where it may need full tensors."""


class TappedRun(ABC):
    """Run of a cell with taps, which is made when it is first asked for."""

    @property
    @abstractmethod
    def record(self) -> CapturedShards:
        """Record of the run. Raises CellFailed if it does not finish."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """Ranks by their places in the mesh."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, float]:
        """Numbers by name that a wrong ratio may equal."""

    @property
    @abstractmethod
    def steps(self) -> Sequence[int]:
        """Numbers of the steps."""

    @abstractmethod
    def collectives(self, rank: int) -> Sequence[Collective]:
        """Return the collectives of a rank in the order of issue."""

    @abstractmethod
    def begin(self) -> Iterator[Location | None]:
        """Yield the first wrong places before the first step."""

    @abstractmethod
    def expected(self, step: int) -> ExpectedStep:
        """Return a step in one process, from the weights with which the step of the run began."""

    def begin_step(self, step: int) -> Iterator[Location | None]:
        """Yield the first wrong number with which a step begins."""
        yield from ()

    @abstractmethod
    def logged_loss(self, step: int, expected: ExpectedStep) -> Location | None:
        """Return a location if a rank has logged another loss than that of one process."""

    @property
    def telling_norms(self) -> Sequence[int]:
        """Ranks that log norms."""
        return self.ranks.all

    @abstractmethod
    def logged_norm(self, step: int, rank: int) -> float | None:
        """Return the norm before clipping that a rank has logged; None if it was not finite."""

    @abstractmethod
    def clipping(self, step: int, gradients: Shards) -> Clipping | None:
        """Return the options of clipping of full gradients; None for a step in which nothing is clipped."""

    @abstractmethod
    def updates(self, step: int) -> Iterator[Update | Location]:
        """Yield the tensors that the optimizer should leave, or a first wrong place that is no tensor."""

    @cached_property
    def traces(self) -> list[Trace]:
        """Taps by rank."""
        return [read_trace(self.record.directory, rank=rank) for rank in self.ranks.all]

    def first_wrong(self) -> Location | None:
        """Return the first wrong place in the order of execution."""
        return next(self._wrong(), None)

    def shards(self, prefix: str, rank: int) -> dict[str, Tensor]:
        """Return a rank's tensors whose keys begin with `WHEN/KIND/`, by the rest of the key."""
        return self.record.shards_below(prefix, rank=rank)

    def _wrong(self) -> Iterator[Location]:
        yield from filter(None, self.begin())
        for step in self.steps:
            yield from filter(None, self._step(step))

    def _step(self, step: int) -> Iterator[Location | None]:
        yield from self.begin_step(step)
        expected = self.expected(step)
        compared = ComparedStep(step, self.ranks, self.traces, expected)
        collectives = [self.collectives(rank) for rank in self.ranks.all]
        tensor = first_wrong_tensor(compared, sizes=self.sizes, collectives=collectives)
        wrong = next(wrong_collectives(step, self.ranks, self.traces, collectives), None)
        if wrong is not None and not _is_before(tensor, wrong, compared):
            yield self._collective(step, wrong, compared)
        yield tensor
        yield self._reduction(step, expected, compared)
        yield self.logged_loss(step, expected)
        yield from self._clipping(step)
        for update in self.updates(step):
            yield update if isinstance(update, Location) else self._updated(step, update)

    def _collective(self, step: int, wrong: WrongCollective, compared: ComparedStep) -> Location:
        trace, tap = self.traces[wrong.rank], self.traces[wrong.rank].taps[wrong.index]
        modules = [each for each in trace.taps[: wrong.index] if each.kind not in COLLECTIVE]
        before = modules[-1] if modules else None
        name = before.module if before else ""
        told = f"{wrong.collective.kind} {wrong.collective.reduce_op or ''}".strip()
        return self.location(
            "backward" if before and "gradient" in before.kind else "forward",
            name,
            f"result of the {told} over {wrong.collective.group} behind its {before.kind if before else 'begin'}",
            ranks=[wrong.rank],
            step=step,
            equals=wrong.clause,
            agrees="the inputs of the collective on all its ranks are known",
            called=trace.code(before.called) if before else None,
            issued=trace.code(trace.issued[tap.call]) if tap.call < len(trace.issued) else None,
            marks=compared.marks(),
        )

    def _reduction(self, step: int, expected: ExpectedStep, compared: ComparedStep) -> Location | None:
        wrong = wrong_shards(
            self.ranks,
            partial(self.shards, f"step{step}/gradient/"),
            partial(shards_of, self.record, expected.gradients),
            within=expected.gradients_within,
            order=expected.order,
            may_be_more=not expected.gradients,  # none are expected of a step that overflows
        )
        if wrong is None:
            return None
        first = wrong.first
        terms = dict(self._terms(expected, step, first.name, first.rank))
        clause = ""
        if first.measured is not None and terms:
            clause = states.terms_clause(first.measured, terms, weight=expected.weight)
        taps = [tap for tap in self.traces[first.rank].taps if _is_at(tap, step, _gradient_place(first.name))]
        return self.wrong_state(
            wrong,
            "reduction",
            "gradient after its reduction",
            step=step,
            equals=clause,
            collective=self._reductions_clause(step, first.rank, has_terms=any(map(is_partial, taps))),
            agrees="the gradients before it agree" if taps else "",
            issued=self._issued(step, first.rank),
            marks=compared.marks(),
        )

    def _terms(self, expected: ExpectedStep, step: int, name: str, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield gradients before their reduction, cut to a rank's shard of a parameter.

        These are the run's own terms where each tensor-parallel rank has one of the full shape, or else those of the
        oracle by data rank and micro-batch.
        """
        place = _gradient_place(name)
        own = [(each, tap) for each in self.ranks.all for tap in self.traces[each].taps if _is_at(tap, step, place)]
        if own and all(is_partial(tap) for _, tap in own):
            calls = len({tap.call for _, tap in own})
            for each, tap in own:
                term = self.traces[each].tensor(tap.place)
                if term is not None and tuple(term.shape) == tuple(self.record.parameters[name].shape):
                    yield _term_name(each, tap, calls), shards_of(self.record, {name: term}, rank)[name]
            return
        for data_rank, trace in enumerate(expected.traces):
            taps = [tap for tap in trace.taps if _is_at(tap, step, place)]
            for tap in taps:
                term = trace.tensor(tap.place)
                if term is not None:
                    noun = _term_name(self.ranks.data_ranks.index(data_rank), tap, len(taps))
                    yield noun, shards_of(self.record, {name: term}, rank)[name]

    def _reductions_clause(self, step: int, rank: int, *, has_terms: bool) -> str:
        """Return a clause about the reductions of gradients; `has_terms` if tensor-parallel ranks have terms of one."""
        kinds = ("reduce_scatter", "all_reduce")
        found = [
            f"{each.kind} over {each.group}"
            for each in self.collectives(rank)
            if each.step == step and each.phase == "backward" and each.kind in kinds
        ]
        names = [f"{found.count(name)} x {name}" for name in dict.fromkeys(found)]
        over = self.ranks.reduction_dimensions()
        told = f"between them: {', '.join(names)}" if names else f"a reduction over {over}: not issued"
        is_lacking = has_terms and not any(name.startswith("all_reduce over tp") for name in found)
        return f"{told}; all_reduce over tp: not issued" if is_lacking else told

    def _issued(self, step: int, rank: int) -> Code | None:
        trace, kinds = self.traces[rank], ("reduce_scatter", "all_reduce")
        for index, each in enumerate(self.collectives(rank)):
            if each.step == step and each.phase == "backward" and each.kind in kinds and index < len(trace.issued):
                return trace.code(trace.issued[index])
        return None

    def _clipping(self, step: int) -> Iterator[Location | None]:
        gradients = assembled(self.record, f"step{step}/gradient/")
        clipping = self.clipping(step, gradients)
        norm = total_norm(gradients.values(), order=clipping.order) if clipping else math.nan
        if clipping is None or not math.isfinite(norm):
            return
        yield self._norm(step, gradients, norm, clipping)
        factor = clip_factor(norm, max_norm=clipping.max_norm)
        scaled = {name: (gradient.double() * factor).to(gradient.dtype) for name, gradient in gradients.items()}
        wrong = wrong_shards(
            self.ranks,
            partial(self.shards, f"step{step}/clipped/"),
            partial(shards_of, self.record, scaled),
            within=clipping.gradients_within,
            order=[*self.record.parameters],
        )
        if wrong is not None:
            own = shards_of(self.record, gradients, wrong.first.rank)
            yield self.wrong_state(
                wrong,
                "clipping",
                "clipped gradient",
                step=step,
                others={"the gradient as it was before clipping": own[wrong.first.name]},
                agrees=f"gradients and norm agree, the factor is {factor:.6g}",
                called=self.line(step, wrong.first.rank, "clip", last=True),
            )

    def _norm(self, step: int, gradients: Shards, expected: float, clipping: Clipping) -> Location | None:
        logged = {rank: self.logged_norm(step, rank) for rank in self.telling_norms}
        allowed = clipping.norm_within * expected
        wrong = [rank for rank, norm in logged.items() if norm is None or abs(norm - expected) > allowed]
        if not wrong:
            return None
        norm = logged[wrong[0]]
        others = self._other_norms(step, gradients, clipping.order)
        return self.location(
            "clipping",
            "",
            f"total {clipping.order:g}-norm of the gradients",
            ranks=wrong,
            step=step,
            equals=states.number_clause(math.nan if norm is None else norm, expected, others),
            agrees="the gradients agree",
            collective=self._clip_collectives(step, wrong[0]),
            called=self._line_of_number(step, wrong[0], "clip", norm) or self.line(step, wrong[0], "clip"),
        )

    def _clip_collectives(self, step: int, rank: int) -> str:
        found = [
            f"{each.kind} over {each.group}{f' ({each.reduce_op})' if each.reduce_op else ''}"
            for each in self.collectives(rank)
            if each.step == step and each.phase == "clip"
        ]
        names = [f"{found.count(name)} x {name}" for name in dict.fromkeys(found)]
        missing = [name for name in self.ranks.sharding_dimensions() if not any(name in each for each in found)]
        lacking = "".join(f"; all_reduce over {name}: not issued" for name in missing)
        return f"collectives of clipping: {', '.join(names) or 'none'}{lacking}"

    def _other_norms(self, step: int, gradients: Shards, order: float) -> Iterator[tuple[str, float]]:
        """Yield norms that a wrong one may equal, with a clause about each."""
        shards = [self.shards(f"step{step}/gradient/", rank) for rank in self.ranks.all]
        for rank in self.ranks.all:
            yield f"the norm of the shards of rank {rank}", total_norm(shards[rank].values(), order=order)
        every = [shard for own in shards for shard in own.values()]
        yield "the norm of the shards of all ranks, copies included", total_norm(every, order=order)
        for other_order in (1.0, 2.0, math.inf):
            if other_order != order:
                yield f"the {other_order:g}-norm", total_norm(gradients.values(), order=other_order)
        clipped = assembled(self.record, f"step{step}/clipped/")
        yield "the norm of the clipped gradients", total_norm(clipped.values(), order=order)

    def _updated(self, step: int, update: Update) -> Location | None:
        wrong = wrong_shards(
            self.ranks,
            partial(self.shards, update.after),
            lambda rank: update.expected[rank],
            within=update.within,
            order=[*self.record.parameters],
        )
        if wrong is None:
            return None
        name, rank = wrong.first.name, wrong.first.rank
        others = {"the value before the step": self.shards(update.before, rank).get(name)}
        if update.by_shard:
            others["the result for this rank's shard alone: this optimizer needs full tensors"] = update.by_shard[
                rank
            ].get(name)
        return self.wrong_state(
            wrong,
            "optimizer",
            "value after the step" if update.kind == "parameter" else f"optimizer state {update.kind}",
            step=step,
            others={told: tensor for told, tensor in others.items() if tensor is not None},
            agrees="its gradient and the state before the step agree",
            called=self.line(step, wrong.first.rank, "optimizer"),
        )

    def line(self, step: int, rank: int, phase: str, *, last: bool = False) -> Code | None:
        """Return the first or the last line of the trainer that computed in a phase of a step, if it was noted."""
        trace = self.traces[rank]
        lines = trace.scalars.get(f"{step} {phase}", [])
        return trace.code(lines[-1 if last else 0]) if lines else None

    def _line_of_number(self, step: int, rank: int, phase: str, value: float | None) -> Code | None:
        """Return the first line of the trainer that computed a number in a phase of a step; None if none did."""
        trace = self.traces[rank]
        for number in trace.numbers.get(f"{step} {phase}", ()) if value is not None else ():
            if number.value == value:
                return trace.code(number.line)
        return None

    def wrong_state(
        self,
        wrong: WrongState | None,
        stage: Stage,
        quantity: str,
        *,
        step: int | None = None,
        equals: str = "",
        others: Shards | None = None,
        agrees: str = "",
        collective: str = "",
        called: Code | None = None,
        issued: Code | None = None,
        marks: dict[str, Mark] | None = None,
    ) -> Location | None:
        """Return the location of wrong shards; None without any. `others` are tensors that a wrong one may equal."""
        if wrong is None:
            return None
        found = equals or states.equals(wrong.first, sizes=self.sizes, others=others or {})
        return self.location(
            stage,
            wrong.first.name,
            quantity,
            ranks=wrong.ranks,
            step=step,
            equals=found,
            elements="; ".join(filter(None, [wrong.share_clause, states.elements(self.record, wrong)])),
            agrees=agrees,
            collective=collective,
            called=called,
            issued=issued,
            marks=marks,
            wrong=wrong.names,
        )

    def location(
        self,
        stage: Stage,
        name: str,
        quantity: str,
        *,
        ranks: list[int],
        step: int | None = None,
        equals: str = "",
        elements: str = "",
        agrees: str = "",
        collective: str = "",
        called: Code | None = None,
        issued: Code | None = None,
        marks: dict[str, Mark] | None = None,
        wrong: Sequence[str] = (),
    ) -> Location:
        """Return a location in this run; `wrong` are the names of all wrong tensors of the place."""
        modules = {path: kind for trace in self.traces for path, kind in trace.modules.items()}
        tree: dict[str, Mark] = marks or dict.fromkeys(modules, "right")
        for each in wrong:
            tree[each.rpartition(".")[0]] = "follows"
        module = name if name in modules else name.rpartition(".")[0]
        tree[module] = "wrong"
        return Location(
            case="",
            cell="",
            family="tensor",
            stage=stage,
            name=name,
            quantity=quantity,
            step=step,
            ranks=ranks,
            ranks_text=self.ranks.text(ranks),
            module_class=modules.get(module, ""),
            equals=equals,
            elements=elements,
            agrees=agrees,
            collective=collective,
            called=called,
            issued=issued,
            tree=tree,
        )


def _is_before(tensor: Location | None, wrong: WrongCollective, compared: ComparedStep) -> bool:
    """Return whether a wrong tensor was tapped before the result of a wrong collective on the same rank."""
    first = next((each for each in compared.wrong if each.rank == wrong.rank), None)
    return tensor is not None and first is not None and first.index < wrong.index


def _is_at(tap: Tap, step: int, place: tuple[str, str, str]) -> bool:
    return tap.step == step and (tap.module, tap.kind, tap.item) == place


def _gradient_place(name: str) -> tuple[str, str, str]:
    """Return module, kind and item of the gradient of a parameter."""
    module, _, item = name.rpartition(".")
    return module, "parameter gradient", item


def _term_name(rank: int, tap: Tap, calls: int) -> str:
    return f"rank {rank}, micro-batch {tap.call}" if calls > 1 else f"rank {rank}"
