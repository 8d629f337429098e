"""Run of the reference trainer with taps: its stages, each compared with an oracle in one process."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from conformance.instruments.facts import StepFacts
from conformance.localisation import states
from conformance.localisation.equality import deviation
from conformance.localisation.expected import ExpectedStep, expected_step
from conformance.localisation.ranks import Ranks, ranks_of
from conformance.localisation.shards import assembled
from conformance.localisation.states import WrongState, shards_of, wrong_shards
from conformance.localisation.tensors import first_wrong_tensor
from conformance.localisation.traces import Trace, read_trace
from conformance.localisation.walk import ComparedStep
from conformance.oracles import tolerance
from conformance.oracles.initialisation import initial_weights
from conformance.oracles.plain_optimizer import Start, chosen_on_device, plain_updates
from conformance.oracles.dtype_policy import optimizer_state
from conformance.oracles.reference import clip_factor, initial_model, learning_rate, total_norm
from conformance.plan.cells import Cell
from conformance.report.location import Code, Location, Mark, Stage
from conformance.run.case_runs import CaseRuns
from conformance.run.record import Record


class ReferenceRun:
    """One run of a cell with taps, made when it is first asked for."""

    def __init__(self, runs: CaseRuns, cell: Cell) -> None:
        self._runs, self._cell, self._config = runs, cell, cell.config

    @cached_property
    def record(self) -> Record:
        """Record of the run. Raises CellFailed if it does not finish."""
        return self._runs.run(self._cell, tapped=True)

    @cached_property
    def traces(self) -> list[Trace]:
        """Taps by rank."""
        return [read_trace(self.record.directory, rank=rank) for rank in range(self._cell.world_size)]

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks by their places in the mesh."""
        return ranks_of(self.record)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Numbers by name that a wrong ratio may equal."""
        facts = self._cell.facts()
        names = ("tp", "dp", "dp_shard", "dp_replicate", "pp", "world", "accumulation")
        return {name: float(facts[name]) for name in names if float(facts[name]) != 1.0}

    def first_wrong(self) -> Location | None:
        """Return the first wrong place in the order of execution."""
        return next(self._wrong(), None)

    def _wrong(self) -> Iterator[Location]:
        yield from filter(None, self._begin())
        for step in self.record.steps:
            yield from filter(None, self._step(step))

    def _begin(self) -> Iterator[Location | None]:
        record = self.record
        if record.steps[0] == 0:
            weights = initial_weights(self._cell.config)
            yield self._state(
                wrong_shards(
                    self.ranks, partial(self._shards, "initial/parameter/"), partial(shards_of, record, weights)
                ),
                "initial values",
                "initial value",
            )
        buffers = {name: buffer.detach() for name, buffer in initial_model(self._cell.config).named_buffers()}
        yield self._state(
            wrong_shards(self.ranks, partial(self._shards, "initial/buffer/"), lambda _rank: buffers),
            "initial values",
            "initial value of the buffer",
        )

    def _shards(self, prefix: str, rank: int) -> dict[str, Tensor]:
        return self.record.shards_below(prefix, rank=rank)

    def _facts(self, step: int, rank: int = 0) -> StepFacts:
        return next(facts for facts in self.record.ranks[rank].steps if facts.step == step)

    def _step(self, step: int) -> Iterator[Location | None]:
        expected = expected_step(self.record, step)
        compared = ComparedStep(step, self.ranks, self.traces, expected)
        sizes = self.sizes | ({"loss scale": self._facts(step).loss_scale} if self._facts(step).loss_scale != 1 else {})
        collectives = [facts.collectives for facts in self.record.ranks]
        yield first_wrong_tensor(compared, sizes=sizes, collectives=collectives)
        yield self._reduction(step, expected, compared)
        yield self._norm(step)
        yield self._clipped(step)
        yield from self._optimizer(step)

    def _reduction(self, step: int, expected: ExpectedStep, compared: ComparedStep) -> Location | None:
        oracle = expected.traces[0]
        order = [f"{tap.module}.{tap.item}" for tap in oracle.taps if tap.kind == "parameter gradient"]
        wrong = wrong_shards(
            self.ranks,
            partial(self._shards, f"step{step}/gradient/"),
            partial(shards_of, self.record, expected.gradients),
            within=expected.gradients_within,
            order=order,
        )
        if wrong is None:
            return None
        first = wrong.first
        terms = dict(self._terms(expected, step, first.name, first.rank))
        weight = 1.0 / (len(expected.traces) * self._facts(step).loss_scale)
        clause = states.terms_clause(first.measured, terms, weight=weight) if first.measured is not None and terms else ""
        return self._state(
            wrong,
            "reduction",
            "gradient after its reduction",
            step=step,
            equals=clause,
            collective=self._reductions_clause(step, first.rank),
            agrees="the gradients before it agree",
            code=self._issued(step, first.rank, ("reduce_scatter", "all_reduce"), "backward"),
            marks=compared.marks(),
        )

    def _terms(self, expected: ExpectedStep, step: int, name: str, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of the gradients of data ranks and micro-batches that are of a rank's shard of a parameter."""
        module, _, item = name.rpartition(".")
        for data_rank, trace in enumerate(expected.traces):
            for call in range(self._config.accumulation):
                term = trace.tensor((step, module, "parameter gradient", item, call, False))
                if term is not None:
                    noun = f"rank {self.ranks.data_ranks.index(data_rank)}"
                    of = f"{noun}, micro-batch {call}" if self._config.accumulation > 1 else noun
                    yield of, shards_of(self.record, {name: term}, rank)[name]

    def _reductions_clause(self, step: int, rank: int) -> str:
        found = [
            f"{each.kind} over {each.group}"
            for each in self.record.ranks[rank].collectives
            if each.step == step and each.phase == "backward" and each.kind in ("reduce_scatter", "all_reduce")
        ]
        names = [f"{found.count(name)} x {name}" for name in dict.fromkeys(found)]
        over = self.ranks.reduction_dimensions()
        return f"between them: {', '.join(names)}" if names else f"a reduction over {over}: not issued"

    def _issued(self, step: int, rank: int, kinds: Sequence[str], phase: str) -> Code | None:
        trace = self.traces[rank]
        for index, each in enumerate(self.record.ranks[rank].collectives):
            if each.step == step and each.phase == phase and each.kind in kinds and index < len(trace.issued):
                return trace.code(trace.issued[index])
        return None

    def _norm(self, step: int) -> Location | None:
        gradients = assembled(self.record, f"step{step}/gradient/")
        order = self._config.optimizer.norm_order
        expected = total_norm(gradients.values(), order=order)
        within = tolerance.norm(gradients, order=order, roundings=tolerance.norm_roundings(self._config)).value
        logged = {rank: self._facts(step, rank).grad_norm for rank in self.ranks.all}
        wrong = [
            rank
            for rank, norm in logged.items()
            if math.isfinite(expected) and (norm is None or abs(norm - expected) > within * expected)
        ]
        if not wrong:
            return None
        measured = logged[wrong[0]]
        told = math.nan if measured is None else measured
        return self._location(
            "clipping",
            "",
            f"total {order:g}-norm of the gradients",
            ranks=wrong,
            step=step,
            equals=states.number_clause(told, expected, self._other_norms(step, wrong[0], gradients)),
            agrees="the gradients agree",
            collective=self._clip_collectives(step, wrong[0]),
            called=self._line(step, wrong[0], "clip"),
        )

    def _clip_collectives(self, step: int, rank: int) -> str:
        found = [
            f"{each.kind} {each.reduce_op} over {each.group}".replace(" None", "")
            for each in self.record.ranks[rank].collectives
            if each.step == step and each.phase == "clip"
        ]
        names = [f"{found.count(name)} x {name}" for name in dict.fromkeys(found)]
        return f"collectives of clipping: {', '.join(names)}" if names else "collectives of clipping: none"

    def _other_norms(self, step: int, rank: int, gradients: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
        """Yield norms that a wrong one may equal, with a clause about each."""
        order = self._config.optimizer.norm_order
        shards = [self._shards(f"step{step}/gradient/", each) for each in self.ranks.all]
        for other in self.ranks.all:
            yield f"the norm of the shards of rank {other}", total_norm(shards[other].values(), order=order)
        every = [shard for own in shards for shard in own.values()]
        yield "the norm of the shards of all ranks, copies included", total_norm(every, order=order)
        for other_order in (1.0, 2.0, math.inf):
            if other_order != order:
                yield f"the {other_order:g}-norm", total_norm(gradients.values(), order=other_order)
        clipped = assembled(self.record, f"step{step}/clipped/")
        yield "the norm of the clipped gradients", total_norm(clipped.values(), order=order)

    def _clipped(self, step: int) -> Location | None:
        optimizer = self._config.optimizer
        gradients = assembled(self.record, f"step{step}/gradient/")
        norm = total_norm(gradients.values(), order=optimizer.norm_order)
        if not math.isfinite(norm) or self._facts(step).skipped:
            return None
        factor = clip_factor(norm, max_norm=optimizer.max_norm)
        scaled = {name: (gradient.double() * factor).to(gradient.dtype) for name, gradient in gradients.items()}
        roundings = tolerance.norm_roundings(self._config)
        within = tolerance.clipping(gradients, order=optimizer.norm_order, roundings=roundings)
        wrong = wrong_shards(
            self.ranks,
            partial(self._shards, f"step{step}/clipped/"),
            partial(shards_of, self.record, scaled),
            within=within,
        )
        if wrong is None:
            return None
        first = wrong.first
        unchanged = {"the gradient as it was before clipping": shards_of(self.record, gradients, first.rank)[first.name]}
        return self._state(
            wrong,
            "clipping",
            "clipped gradient",
            step=step,
            others=unchanged,
            agrees=f"gradients and norm agree, the factor is {factor:.6g}",
            called=self._line(step, first.rank, "clip", last=True),
        )

    def _optimizer(self, step: int) -> Iterator[Location | None]:
        record, last = self.record, step == self.record.steps[-1]
        on_device = record.device_type != "cpu" and self._cell.config.offload == "none"
        config = chosen_on_device(self._cell.config) if on_device else self._cell.config
        facts = self._facts(step)
        if facts.skipped:
            return
        expected_rate = learning_rate(config, step)
        if not math.isclose(facts.lr, expected_rate, rel_tol=1e-6):
            clause = states.number_clause(facts.lr, expected_rate, iter(()))
            yield self._location("optimizer", "", "learning rate", ranks=[*self.ranks.all], step=step, equals=clause)
        taken = sum(not each.skipped for each in record.ranks[0].steps if each.step < step)
        taken += self._cell.steps_before_save
        before = f"after{step - 1}" if step > record.steps[0] else "resumed"
        kinds = {*optimizer_state(config.optimizer)} & {*record.kinds(before)} if taken else set()
        after = "final/parameter/" if last else f"step{step + 1}/parameter/"

        def updated(rank: int) -> dict[str, dict[str, Tensor]]:
            shards = partial(record.shards_below, rank=rank)
            start = Start(taken, {kind: shards(f"{before}/{kind}/") for kind in kinds})
            gradients = {step: shards(f"step{step}/clipped/")}
            held = {n: p for n, p in shards(f"step{step}/parameter/").items() if n in gradients[step]}
            device = record.kernel_type if on_device else "cpu"
            return plain_updates(config, held, gradients, start=start, device=device)

        results = {rank: updated(rank) for rank in self.ranks.all}
        # FSDP1 has states of flat shards, which are not captured.
        told = sorted(optimizer_state(config.optimizer)) if config.implementation == "fsdp2" else ()
        for kind in ("parameter", *told):
            prefix = after if kind == "parameter" else f"after{step}/{kind}/"
            wrong = wrong_shards(
                self.ranks, partial(self._shards, prefix), lambda rank, kind=kind: results[rank].get(kind, {})
            )
            if wrong is not None:
                first = wrong.first
                old = {
                    "the value before the step": self._shards(
                        f"step{step}/parameter/" if kind == "parameter" else f"{before}/{kind}/", first.rank
                    ).get(first.name, torch.empty(0))
                }
                yield self._state(
                    wrong,
                    "optimizer",
                    "value after the step" if kind == "parameter" else f"optimizer state {kind}",
                    step=step,
                    others=old,
                    agrees="its gradient and the state before the step agree",
                    called=self._line(step, first.rank, "optimizer"),
                )

    def _line(self, step: int, rank: int, phase: str, *, last: bool = False) -> Code | None:
        trace = self.traces[rank]
        lines = trace.scalars.get(f"{step} {phase}", [])
        return trace.code(lines[-1 if last else 0]) if lines else None

    def _state(
        self,
        wrong: WrongState | None,
        stage: Stage,
        quantity: str,
        *,
        step: int | None = None,
        equals: str = "",
        others: Mapping[str, Tensor] | None = None,
        agrees: str = "",
        collective: str = "",
        called: Code | None = None,
        code: Code | None = None,
        marks: dict[str, Mark] | None = None,
    ) -> Location | None:
        if wrong is None:
            return None
        found = equals or states.equals(wrong.first, sizes=self.sizes, others=others or {})
        clauses = [clause for clause in (wrong.share_clause, states.elements(self.record, wrong)) if clause]
        return self._location(
            stage,
            wrong.first.name,
            quantity,
            ranks=wrong.ranks,
            step=step,
            equals=found,
            elements="; ".join(clauses),
            agrees=agrees,
            collective=collective,
            called=called,
            code=code,
            marks=marks,
            wrong=wrong.names,
        )

    def _location(
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
        code: Code | None = None,
        marks: dict[str, Mark] | None = None,
        wrong: Sequence[str] = (),
    ) -> Location:
        tree: dict[str, Mark] = marks or dict.fromkeys((n for t in self.traces for n in t.modules), "right")
        for each in wrong:
            tree[each.rpartition(".")[0]] = "follows"
        tree[name.rpartition(".")[0]] = "wrong"
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
            equals=equals,
            elements=elements,
            agrees=agrees,
            collective=collective,
            called=called,
            issued=code,
            tree=tree,
        )
