"""Run of the reference trainer with taps, and its oracles."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial

from conformance.assertions.dropout import are_masks_seen, masks_of_replicas, repeated_masks
from conformance.assertions.steps import run_before_save, without_checkpoint
from conformance.instruments.facts import Collective, StepFacts
from conformance.instruments.sharding import shared_parameters
from conformance.localisation import states
from conformance.localisation.expected import ExpectedStep, expected_step
from conformance.localisation.ranks import Ranks, ranks_of
from conformance.localisation.shards import assembled
from conformance.localisation.states import Shards, shards_of, wrong_shards
from conformance.localisation.tapped_run import Clipping, TappedRun, Update
from conformance.oracles import tolerance
from conformance.oracles.dtype_policy import optimizer_state
from conformance.oracles.initialisation import initial_weights
from conformance.oracles.loss_scale import loss_scales
from conformance.oracles.plain_optimizer import Start, chosen_on_device, plain_updates
from conformance.oracles.reference import initial_model, learning_rate
from conformance.plan.cells import Cell
from conformance.report.location import Location, Stage
from conformance.run.case_runs import CaseRuns
from conformance.run.record import Record
from reference_trainer.precision import PRECISIONS


class ReferenceRun(TappedRun):
    """Run of a cell of the reference trainer."""

    def __init__(self, runs: CaseRuns, cell: Cell, *, repeat: int = 0) -> None:
        """Take a cell; `repeat` > 0 is a further run of the same one."""
        self._runs, self._cell, self._config, self._repeat = runs, cell, cell.config, repeat

    @cached_property
    def record(self) -> Record:
        """Record of the run. Raises CellFailed if it does not finish."""
        return self._runs.run(self._cell, repeat=self._repeat, tapped=True)

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks by their places in the mesh."""
        return ranks_of(self.record)

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Sizes of the mesh, the number of micro-batches, and the loss scale."""
        facts = self._cell.facts()
        names = ("tp", "dp", "dp_shard", "dp_replicate", "pp", "world", "accumulation")
        sizes = {name: float(facts[name]) for name in names}
        sizes["loss scale"] = self._facts(self.steps[0]).loss_scale
        return {name: size for name, size in sizes.items() if size != 1.0}

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps."""
        return self.record.steps

    def collectives(self, rank: int) -> Sequence[Collective]:
        """Return the collectives of a rank in the order of issue."""
        return self.record.ranks[rank].collectives

    def begin(self) -> Iterator[Location | None]:
        """Yield the first wrong initial parameter and buffer, or the first wrong entry of a resumed state."""
        record = self.record
        if self._cell.steps_before_save:
            yield from self._resumed()
        else:
            weights = initial_weights(self._cell.config)
            yield self._missing(weights)
            expected = partial(shards_of, record, weights)
            order = [*record.parameters]
            wrong = wrong_shards(self.ranks, partial(self.shards, "initial/parameter/"), expected, order=order)
            yield self.wrong_state(wrong, "initial values", "initial value")
            yield self._tied()
        buffers = {name: buffer.detach() for name, buffer in initial_model(self._cell.config).named_buffers()}
        wrong = wrong_shards(self.ranks, partial(self.shards, "initial/buffer/"), lambda _rank: buffers)
        yield self.wrong_state(wrong, "initial values", "initial value of the buffer")

    def _missing(self, weights: Shards) -> Location | None:
        """Return the location of the first parameter that no rank holds."""
        missing = [name for name in weights if name not in self.record.parameters]
        if not missing:
            return None
        others = f"; {len(missing)} of {len(weights)} parameters are missing" if len(missing) > 1 else ""
        equals = f"is held by no rank{others}"
        return self.location("initial values", missing[0], "parameter", ranks=[*self.ranks.all], equals=equals)

    def _tied(self) -> Location | None:
        """Return the location of a weight that is tied to another than expected."""
        model = initial_model(self._cell.config)
        expected = [names for names in shared_parameters(model) if len(names) > 1]
        wrong = [facts.rank for facts in self.record.ranks if facts.shared_parameters["initialized"] != expected]
        if not wrong or self._config.mesh.pp > 1:
            return None
        name = expected[0][-1] if expected else self.record.ranks[wrong[0]].shared_parameters["initialized"][0][-1]
        told = f"is one parameter with {expected[0][0]}" if expected else "is tied to none"
        equals = f"is another parameter than expected: it {told} in one process"
        return self.location("initial values", name, "identity of the parameter", ranks=wrong, equals=equals)

    def _resumed(self) -> Iterator[Location | None]:
        """Yield the first wrong tensor of the restored state, compared with that of the run that saved it."""
        first = self._cell.steps_before_save
        if self.steps[0] != first:
            equals = f"is step {self.steps[0]}, expected step {first}"
            yield self.location("resumed state", "", "first step", ranks=[*self.ranks.all], equals=equals)
        yield self._step_counter()
        for kind, full in self._saved_state().items():
            wrong = wrong_shards(
                self.ranks,
                partial(self.shards, f"resumed/{kind}/"),
                partial(shards_of, self.record, full),
                order=[*self.record.parameters],
            )
            yield self.wrong_state(wrong, "resumed state", f"restored {kind}")

    def _step_counter(self) -> Location | None:
        """Return the location of an optimizer's step counter that has not counted the steps that were taken."""
        expected = float(self._taken_before + len(self.record.steps_taken))
        measured = {
            facts.rank: {count for group in facts.optimizer_groups for count in group.steps if count is not None}
            for facts in self.record.ranks
        }
        wrong = [rank for rank, counts in measured.items() if counts - {expected}]
        if not wrong:
            return None
        counts = ", ".join(f"{count:g}" for count in sorted(measured[wrong[0]]))
        equals = f"is {counts} after the last step, expected {expected:g}"
        return self.location("resumed state", "", "step counter of the optimizer", ranks=wrong, equals=equals)

    def _saved_state(self) -> dict[str, Shards]:
        """Return parameters and optimizer state of the run that saved them, as full tensors by kind."""
        first = self._cell.steps_before_save
        if self._cell.saved_on != "same":
            saved = self._runs.run(run_before_save(self._cell))
            return {kind: saved.select(f"final/{kind}/") for kind in saved.kinds("final") if kind != "buffer"}
        unbroken = self._runs.run(without_checkpoint(self._cell), tapped=True)
        when = {kind: f"after{first - 1}/{kind}/" for kind in unbroken.kinds(f"after{first - 1}")}
        return {kind: unbroken.select(key) for kind, key in {"parameter": f"step{first}/parameter/", **when}.items()}

    def begin_step(self, step: int) -> Iterator[Location | None]:
        """Yield a wrong learning rate or loss scale, or the first wrong mask of dropout."""
        yield self._loss_scale(step)
        yield self._learning_rate(step)
        if step == self._cell.steps_before_save and self._unbroken is not None:
            key, unbroken = f"step{step}/dropout/forward/", self._unbroken
            wrong = wrong_shards(
                self.ranks, partial(self.shards, key), lambda rank: unbroken.shards_below(key, rank=rank)
            )
            if wrong is not None:
                equals = "draws other masks of dropout than in the run that never stopped"
                quantity = "state of the random generator"
                yield self.location("resumed state", "", quantity, ranks=wrong.ranks, step=step, equals=equals)
        yield self._mask(step)

    def _mask(self, step: int) -> Location | None:
        """Return the location of the first mask that is drawn again elsewhere, or differs from that of a replica."""
        record = self.record
        if not self._cell.dropout or not are_masks_seen(record):
            return None
        unlike = masks_of_replicas(record, step)
        earlier = [each for each in self.steps if each <= step]
        wrong = unlike or [pair for pair in repeated_masks(record, earlier) if pair[0].step == step]
        if not wrong:
            return None
        place, first = min(wrong, key=lambda pair: (*pair[0][1:], pair[0].rank))
        return self.location(
            "forward",
            f"layers.{place.layer}.dropout",
            f"mask of call {place.call}",
            ranks=[place.rank],
            step=step,
            equals=f"differs from that of rank {first.rank}" if unlike else f"is that of {first}",
        )

    @cached_property
    def _unbroken(self) -> Record | None:
        """Record of the run that never stopped, if it can be compared with a resumed one."""
        is_same = self._cell.steps_before_save and self._cell.saved_on == "same"
        return self._runs.run(without_checkpoint(self._cell)) if is_same else None

    @cached_property
    def _skipped_before(self) -> list[bool]:
        """True for each step before the restored state that was skipped."""
        first = self._cell.steps_before_save
        if not first:
            return []
        saved = self._unbroken or self._runs.run(run_before_save(self._cell))
        return [facts.skipped for facts in saved.ranks[0].steps][:first]

    def _loss_scale(self, step: int) -> Location | None:
        if not PRECISIONS[self._config.precision].scales_loss:
            return None
        skipped = self._skipped_before + [facts.skipped for facts in self.record.ranks[0].steps]
        expected = loss_scales(self._config.loss_scale, skipped)[step]
        measured = {rank: self._facts(step, rank).loss_scale for rank in self.ranks.all}
        wrong = [rank for rank, scale in measured.items() if scale != expected]
        if not wrong:
            return None
        equals = f"is {measured[wrong[0]]:g}, expected {expected:g}"
        stage: Stage = "resumed state" if 0 < step == self._cell.steps_before_save else "loss"
        return self.location(stage, "", "loss scale", ranks=wrong, step=step, equals=equals)

    def logged_loss(self, step: int, expected: ExpectedStep) -> Location | None:
        """Return a location if a rank has logged another loss than that of one process."""
        losses = {rank: self._facts(step, rank).loss for rank in self.ranks.all}
        allowed = expected.loss_within * abs(expected.loss)
        wrong = [
            rank
            for rank, loss in losses.items()
            if math.isfinite(expected.loss) and (loss is None or abs(loss - expected.loss) > allowed)
        ]
        if not wrong:
            return None
        loss = losses[wrong[0]]
        equals = states.number_clause(math.nan if loss is None else loss, expected.loss, iter(()))
        return self.location(
            "loss",
            "",
            "loss that is logged",
            ranks=wrong,
            step=step,
            equals=equals,
            called=self.line(step, wrong[0], "idle"),
        )

    def _skipped(self, step: int) -> Location | None:
        """Return a location if ranks skip a step whose gradients are finite, or take one whose gradients are not."""
        gradients = assembled(self.record, f"step{step}/gradient/")
        overflows = not all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        expected = overflows and PRECISIONS[self._config.precision].scales_loss
        wrong = [rank for rank in self.ranks.all if self._facts(step, rank).skipped != expected]
        if not wrong:
            return None
        equals = f"is {'taken' if expected else 'skipped'}, and gradients {'overflow' if overflows else 'are finite'}"
        return self.location("optimizer", "", "step", ranks=wrong, step=step, equals=equals)

    def expected(self, step: int) -> ExpectedStep:
        """Return a step in one process, from the weights with which the step of the run began."""
        return expected_step(self.record, step)

    def _facts(self, step: int, rank: int = 0) -> StepFacts:
        return next(facts for facts in self.record.ranks[rank].steps if facts.step == step)

    def logged_norm(self, step: int, rank: int) -> float | None:
        """Return the norm before clipping that a rank has logged; None if it was not finite."""
        return self._facts(step, rank).grad_norm

    def clipping(self, step: int, gradients: Shards) -> Clipping | None:
        """Return the options of clipping; None for a step that is skipped."""
        if self._facts(step).skipped:
            return None
        options, roundings = self._config.optimizer, tolerance.norm_roundings(self._config)
        return Clipping(
            order=options.norm_order,
            max_norm=options.max_norm,
            norm_within=tolerance.norm(gradients, order=options.norm_order, roundings=roundings).value,
            gradients_within=tolerance.clipping(gradients, order=options.norm_order, roundings=roundings),
        )

    def updates(self, step: int) -> Iterator[Update | Location]:
        """Yield parameters and optimizer state that torch's optimizer leaves on plain tensors of the same shards."""
        record = self.record
        skipped = self._skipped(step)
        if skipped is not None:
            yield skipped
        # FSDP1 has states of flat shards, which are not captured, so that a step cannot go on from them.
        if self._facts(step).skipped or self._config.implementation == "fsdp1":
            return
        on_device = record.device_type != "cpu" and self._config.offload == "none"
        config = chosen_on_device(self._config) if on_device else self._config
        kinds = optimizer_state(config.optimizer)
        before = f"after{step - 1}" if step > self.steps[0] else "resumed"
        known = {*kinds} & {*record.kinds(before)}
        results = []
        for rank in self.ranks.all:
            shards = partial(self.shards, rank=rank)
            gradients = shards(f"step{step}/clipped/")
            held = {name: p for name, p in shards(f"step{step}/parameter/").items() if name in gradients}
            taken = self._steps_taken(rank, step, held)
            state = {kind: shards(f"{before}/{kind}/") for kind in known} if any(taken.values()) else {}
            device = record.kernel_type if on_device else "cpu"
            results.append(plain_updates(config, held, {step: gradients}, start=Start(taken, state), device=device))
        after = "final/parameter/" if step == self.steps[-1] else f"step{step + 1}/parameter/"
        for kind in ("parameter", *sorted(kinds)):
            yield Update(
                kind=kind,
                before=f"step{step}/parameter/" if kind == "parameter" else f"{before}/{kind}/",
                after=after if kind == "parameter" else f"after{step}/{kind}/",
                expected=[result.get(kind, {}) for result in results],
            )

    def _steps_taken(self, rank: int, step: int, parameters: Collection[str]) -> dict[str, int]:
        """Return the steps before this one in which the optimizer of a rank has changed each of its parameters."""
        taken = Counter(dict.fromkeys(parameters, self._taken_before))
        for earlier in self.record.ranks[rank].steps:
            if earlier.step < step and not earlier.skipped:
                taken.update(self.shards(f"step{earlier.step}/clipped/", rank=rank).keys())
        return taken

    def _learning_rate(self, step: int) -> Location | None:
        measured, expected = self._facts(step).lr, learning_rate(self._config, step)
        if math.isclose(measured, expected, rel_tol=1e-6):
            return None
        equals = states.number_clause(measured, expected, iter(()))
        stage: Stage = "resumed state" if self._cell.steps_before_save else "optimizer"
        return self.location(stage, "", "learning rate", ranks=[*self.ranks.all], step=step, equals=equals)

    @cached_property
    def _taken_before(self) -> int:
        """Number of steps that the run which saved the resumed state has taken, without those that it skipped."""
        return self._skipped_before.count(False)
