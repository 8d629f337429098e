"""Run of the reference trainer with taps, and its oracles."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from conformance.assertions.steps import run_before_save, without_checkpoint
from conformance.instruments.facts import Collective, StepFacts
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
            expected = partial(shards_of, record, initial_weights(self._cell.config))
            wrong = wrong_shards(self.ranks, partial(self.shards, "initial/parameter/"), expected)
            yield self.wrong_state(wrong, "initial values", "initial value")
        buffers = {name: buffer.detach() for name, buffer in initial_model(self._cell.config).named_buffers()}
        wrong = wrong_shards(self.ranks, partial(self.shards, "initial/buffer/"), lambda _rank: buffers)
        yield self.wrong_state(wrong, "initial values", "initial value of the buffer")

    def _resumed(self) -> Iterator[Location | None]:
        """Yield the first wrong tensor of the restored state, compared with that of the run that saved it."""
        first = self._cell.steps_before_save
        if self.steps[0] != first:
            equals = f"is step {self.steps[0]}, expected step {first}"
            yield self.location("resumed state", "", "first step", ranks=[*self.ranks.all], equals=equals)
        for kind, full in self._saved_state().items():
            wrong = wrong_shards(
                self.ranks, partial(self.shards, f"resumed/{kind}/"), partial(shards_of, self.record, full)
            )
            yield self.wrong_state(wrong, "resumed state", f"restored {kind}")

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
        """Yield a wrong loss scale, or the first wrong mask of dropout after a state was restored."""
        yield self._loss_scale(step)
        if step == self._cell.steps_before_save and self._unbroken is not None:
            key, unbroken = f"step{step}/dropout/forward/", self._unbroken
            wrong = wrong_shards(
                self.ranks, partial(self.shards, key), lambda rank: unbroken.shards_below(key, rank=rank)
            )
            yield self.wrong_state(
                wrong, "resumed state", "mask of dropout, which the random generator draws", step=step
            )

    @cached_property
    def _unbroken(self) -> Record | None:
        """Record of the run that never stopped, if it can be compared with a resumed one."""
        is_same = self._cell.steps_before_save and self._cell.saved_on == "same"
        return self._runs.run(without_checkpoint(self._cell)) if is_same else None

    def _loss_scale(self, step: int) -> Location | None:
        if not PRECISIONS[self._config.precision].scales_loss:
            return None
        history = self._unbroken or self.record
        skipped = [facts.skipped for facts in history.ranks[0].steps]
        scales = loss_scales(self._config.loss_scale, skipped)
        expected = scales[history.steps.index(step)]
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
        if self._facts(step).skipped:
            return
        on_device = record.device_type != "cpu" and self._config.offload == "none"
        config = chosen_on_device(self._config) if on_device else self._config
        yield from self._learning_rate(step)
        taken = self._taken_before + sum(not each.skipped for each in record.ranks[0].steps if each.step < step)
        kinds = optimizer_state(config.optimizer)
        before = f"after{step - 1}" if step > self.steps[0] else "resumed"
        known = {*kinds} & {*record.kinds(before)} if taken else set()
        results = []
        for rank in self.ranks.all:
            shards = partial(self.shards, rank=rank)
            gradients = shards(f"step{step}/clipped/")
            held = {name: p for name, p in shards(f"step{step}/parameter/").items() if name in gradients}
            start = Start(taken, {kind: shards(f"{before}/{kind}/") for kind in known})
            device = record.kernel_type if on_device else "cpu"
            results.append(plain_updates(config, held, {step: gradients}, start=start, device=device))
        after = "final/parameter/" if step == self.steps[-1] else f"step{step + 1}/parameter/"
        # FSDP1 has states of flat shards, which are not captured.
        for kind in ("parameter", *(sorted(kinds) if config.implementation == "fsdp2" else ())):
            yield Update(
                kind=kind,
                before=f"step{step}/parameter/" if kind == "parameter" else f"{before}/{kind}/",
                after=after if kind == "parameter" else f"after{step}/{kind}/",
                expected=[result.get(kind, {}) for result in results],
            )

    def _learning_rate(self, step: int) -> Iterator[Location]:
        measured, expected = self._facts(step).lr, learning_rate(self._config, step)
        if not math.isclose(measured, expected, rel_tol=1e-6):
            equals = states.number_clause(measured, expected, iter(()))
            yield self.location("optimizer", "", "learning rate", ranks=[*self.ranks.all], step=step, equals=equals)

    @cached_property
    def _taken_before(self) -> int:
        """Number of steps that the run which saved the resumed state has taken, without those that it skipped."""
        if not self._cell.steps_before_save:
            return 0
        saved = self._unbroken or self._runs.run(run_before_save(self._cell))
        return sum(step < self._cell.steps_before_save for step in saved.steps_taken)
