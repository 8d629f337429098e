"""Run of another trainer with taps, and its oracles: the subject's own model and optimizer in one process."""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import msgspec
import torch
from msgspec.structs import replace as with_fields
from safetensors.torch import load_file
from torch import Tensor

from conformance.bound import Bound
from conformance.instruments.facts import Collective
from conformance.instruments.taps import Line
from conformance.instruments.tensor_file import write_tensors
from conformance.localisation import states
from conformance.localisation.equality import CLOSE, deviation, multiple
from conformance.localisation.expected import ExpectedStep, PlaceRule, backward_order
from conformance.localisation.formulas import weights_by_step
from conformance.localisation.ranks import Ranks
from conformance.localisation.shards import assembled
from conformance.localisation.states import Shards, shards_of, wrong_shards
from conformance.localisation.tapped_run import Clipping, TappedRun, Update
from conformance.localisation.traces import Trace, read_trace
from conformance.localisation.walk import ComparedStep
from conformance.oracles import tolerance
from conformance.plan.cells import Cell
from conformance.report.location import Code, Location
from conformance.subjects.evidence import (
    BF16_FACTOR,
    FP32_FACTOR,
    Evidence,
    SubjectRecord,
    clipping_bounds,
    measured_bound,
)
from conformance.subjects.expectation import (
    FACTS_FILE,
    TENSORS_FILE,
    Decay,
    Expectation,
    step_directory,
)
from conformance.subjects.facts import ShardedParameter
from conformance.subjects.running import SubjectRuns

BETWEEN_STEPS = "value with which the step begins"
"""Quantity of a parameter that was changed since the optimizer has taken the step before."""
_DECAYS: Mapping[Decay, str] = {
    "missing": "{} is not decayed: the weight decay of the declared optimizer is missing",
    "everywhere": "{} is decayed, and the declared optimizer leaves it out of weight decay",
    "decoupled": "weight decay of {} multiplies the weights (as AdamW does), and the declared optimizer adds it to "
    "gradients (L2)",
    "added": "weight decay of {} is added to gradients (L2), and the declared optimizer multiplies the weights (as "
    "AdamW does)",
}
"""Sentences about wrong ways of weight decay, with the name of a parameter to come."""
_SAME = 1e-2
"""Relative distance below which two scales of a loss are the same; mistakes are factors of ranks or samples."""
_NORM_ORDER = 2.0


class SubjectRun(TappedRun):
    """Run of a cell of another trainer."""

    def __init__(self, runs: SubjectRuns, cell: Cell) -> None:
        self._runs, self._cell = runs, cell

    @cached_property
    def evidence(self) -> Evidence:
        """Record of the run, and the reference. Raises CellFailed if a rank does not finish."""
        return self._runs.evidence(self._cell, tapped=True)

    @property
    def record(self) -> SubjectRecord:
        """Record of the run."""
        return self.evidence.record

    @cached_property
    def ranks(self) -> Ranks:
        """Ranks by their places in the mesh, which their data tell: ranks with the same data are in its order."""
        shape, data_ranks = self.record.cell.shape, [facts.data_rank for facts in self.record.ranks]
        coordinates = []
        for rank, data_rank in enumerate(data_ranks):
            coordinate = {"dp_replicate": data_rank // shape["dp_shard"], "dp_shard": data_rank % shape["dp_shard"]}
            coordinate["tp"] = data_ranks[:rank].count(data_rank)
            coordinates.append({name: coordinate[name] for name in shape})
        return Ranks(coordinates, data_ranks)

    @cached_property
    def sizes(self) -> Mapping[str, float]:
        """Sizes of the mesh, and the largest number of micro-batches."""
        cell = self.record.cell
        sizes = {**cell.shape, "dp": cell.data_ranks, "world": cell.world_size, "accumulation": max(cell.accumulation)}
        return {name: float(size) for name, size in sizes.items() if size > 1}

    @property
    def steps(self) -> Sequence[int]:
        """Numbers of the steps that begin with finite weights."""
        return range(len(self._expectation.steps))

    def collectives(self, rank: int) -> Sequence[Collective]:
        """Return the collectives of a rank in the order of issue."""
        issued = self.record.ranks[rank].collectives
        return [with_fields(each, group=self._dimension(rank, each.group)) for each in issued]

    def _dimension(self, rank: int, group: str) -> str:
        """Return the mesh dimension whose ranks are those of a group, or the name that the group has in the log."""
        members = [*self.ranks.all] if group == "world" else _numbers(group)
        dimensions = [name for name in self.ranks.coordinates[rank] if self.ranks.group(rank, name) == members]
        return dimensions[0] if dimensions else group

    def begin(self) -> Iterator[Location | None]:
        """Yield the first state that is uninitialised, not tied or of another dtype, and the first wrong weight."""
        yield self._uninitialised()
        reference, ranks = self.evidence.reference, self.record.ranks
        untied = list(dict.fromkeys(name for facts in ranks for name in facts.untied))
        if untied:
            equals = f"is a parameter of its own, expected {reference.facts.aliases.get(untied[0], 'another')}"
            yield self._initial(untied[0], "tied parameter", [r.rank for r in ranks if untied[0] in r.untied], equals)
        coarse = [name for name, parameter in ranks[0].parameters.items() if parameter.dtype != "float32"]
        if coarse:
            equals = f"is {ranks[0].parameters[coarse[0]].dtype}, expected float32"
            location = self._initial(coarse[0], "dtype of the parameter", [*self.ranks.all], equals)
            yield with_fields(location, family="dtype")
        if self._cell.init == "full":
            initial = {name: tensor.float() for name, tensor in reference.below("initial/").items()}
            expected, order = partial(shards_of, self.record, initial), [*self.record.parameters]
            wrong = wrong_shards(self.ranks, partial(self.shards, "initial/parameter/"), expected, order=order)
            called = self._written(wrong.first.name, wrong.first.rank) if wrong else None
            yield self.wrong_state(wrong, "initial values", "initial value", called=called)

    def _uninitialised(self) -> Location | None:
        reference = self.evidence.reference.facts
        left: dict[str, dict[int, int]] = {}
        for facts in self.record.ranks:
            for name, elements in facts.uninitialised.items():
                if elements > reference.meant(name, init=self._cell.init):
                    left.setdefault(name, {})[facts.rank] = elements
        if not left:
            return None
        name, by_rank = next(iter(left.items()))
        equals = f"not initialised: {max(by_rank.values())} elements hold what memory held before"
        return self._initial(name, "initial value", [*by_rank], equals)

    def _initial(self, name: str, quantity: str, ranks: list[int], equals: str) -> Location:
        called = self._written(name, ranks[0])
        return self.location("initial values", name, quantity, ranks=ranks, equals=equals, called=called, wrong=[name])

    def _written(self, name: str, rank: int) -> Code | None:
        """Return the line that last wrote a parameter or a buffer when the model was built."""
        line = self.record.ranks[rank].written.get(name)
        return None if line is None else _code(line)

    def _wrong(self) -> Iterator[Location]:
        yield from super()._wrong()
        yield from self._never_sharded()

    def _never_sharded(self) -> Iterator[Location]:
        """Yield the first parameter that is not sharded over ranks with different data, which no number tells."""
        for name, parameter in self.record.ranks[0].parameters.items():
            if not self._is_sharded(parameter):
                equals = "is no DTensor" if not parameter.is_dtensor else "is the same on all ranks"
                yield self.location(
                    "initial values",
                    name,
                    "layout",
                    ranks=[*self.ranks.all],
                    equals=f"{equals}, expected shards over {self.ranks.reduction_dimensions()}",
                    called=self._sharding_line(),
                    wrong=[name],
                )

    def _is_sharded(self, parameter: ShardedParameter) -> bool:
        data_ranks = self.ranks.data_ranks
        return any(len({data_ranks[rank] for rank in ranks}) > 1 for ranks in parameter.shard_ranks)

    def _sharding_line(self) -> Code | None:
        lines = self.record.ranks[0].sharding
        return _code(lines[-1]) if lines else None

    def _step(self, step: int) -> Iterator[Location | None]:
        if self.record.cell.resumed and step == self.record.cell.saved_after:
            yield from self._resumed(step - 1)
        elif step:
            yield self._changed_since(step - 1)
        for found in super()._step(step):
            is_cast = found is not None and found.family == "dtype"
            yield with_fields(found, called=self._sharding_line() or found.called) if found and is_cast else found

    def _changed_since(self, before: int) -> Location | None:
        """Return the first parameter that is not as the optimizer has left it when the next step begins."""
        left, begun = (partial(self.shards, f"{when}/parameter/") for when in (f"after{before}", f"step{before + 1}"))
        wrong = wrong_shards(self.ranks, begun, left, order=[*self.record.parameters])
        return self.wrong_state(wrong, "parameters", BETWEEN_STEPS, step=before + 1)

    def _resumed(self, saved: int) -> Iterator[Location | None]:
        """Yield the first wrong tensor of the state that was loaded, compared with that after the step before."""
        kinds = {key.split("/")[1] for key in self.record.shards[0] if key.startswith(f"after{saved}/")}
        for kind in sorted(kinds, key=lambda kind: (kind != "parameter", kind)):
            before = partial(self.shards, f"after{saved}/{kind}/")
            order = [*self.record.parameters]
            wrong = wrong_shards(self.ranks, partial(self.shards, f"resumed/{kind}/"), before, order=order)
            others = {}
            if wrong and kind == "parameter":
                initial = self.shards("initial/parameter/", wrong.first.rank).get(wrong.first.name)
                others = {} if initial is None else {"its initial value, so that nothing was loaded": initial}
            yield self.wrong_state(wrong, "resumed state", f"restored {kind}", step=saved + 1, others=others)

    def expected(self, step: int) -> ExpectedStep:
        """Return a step in one process, from the weights with which the step of the run began."""
        facts = self._expectation.steps[step]
        traces = [read_trace(step_directory(self._expected_in, step), rank=rank) for rank in range(len(facts.taps))]
        own, overall = facts.gradients.by_name, facts.gradients.overall
        places = {
            (data_rank, *tap.place[:-1]): PlaceRule(self._bound(errors.own[index], errors.overall[index]), dtypes)
            for data_rank, (trace, errors) in enumerate(zip(traces, facts.taps, strict=True))
            for index, (tap, dtypes) in enumerate(zip(trace.taps, errors.dtypes, strict=True))
        }
        gradients = self._tensors(f"step{step}/gradient/")
        expected = ExpectedStep(
            traces=traces,
            within=self._bound(0.0, 0.0),
            gradients=gradients,
            gradients_within={name: self._bound(own[name], overall) for name in gradients},
            loss=facts.loss,
            loss_within=self._bound(facts.loss_error, overall).value,
            order=backward_order(traces[0]),
            weight=1.0,
            places=places,
            is_layout_known=False,
        )
        reduced = self._reduced(step, expected)
        return self._scaled(expected, self._loss_scale(step, expected), reduced)

    def _bound(self, own: float, overall: float) -> Bound:
        factor = FP32_FACTOR if self.record.cell.precision == "fp32" else BF16_FACTOR
        return measured_bound(factor, own, overall)

    def _reduced(self, step: int, expected: ExpectedStep) -> list[str]:
        """Return the parameters whose reduced gradients agree."""
        wrong = wrong_shards(
            self.ranks,
            partial(self.shards, f"step{step}/gradient/"),
            partial(shards_of, self.record, expected.gradients),
            within=expected.gradients_within,
        )
        return [name for name in expected.gradients if wrong is None or name not in wrong.names]

    def _loss_scale(self, step: int, expected: ExpectedStep) -> float:
        """Return the factor by which the trainer should multiply the mean loss before it calls backward.

        It is the number of data-parallel ranks, if their gradients are averaged, as FSDP2 does by default, or 1 if they
        are summed. Unless the subject declares which, a run that sums is taken at its word, but if its loss has the
        factor that an average needs.
        """
        ranks = float(self.record.cell.data_ranks)
        if self._expectation.reduction:
            return 1.0 if self._expectation.reduction == "sum" else ranks
        scales = self._scales(step, expected)
        measured = assembled(self.record, f"step{step}/gradient/")
        ratios = [multiple(measured[name], g) for name, g in expected.gradients.items() if name in measured]
        reduced = [ratio for ratio in ratios if ratio is not None]
        if not scales or not reduced or all(_is_close(scale, ranks) for scale in scales):
            return ranks
        is_sum = all(_is_close(scale, scales[0]) for scale in scales) and _is_close(median(reduced), scales[0])
        return 1.0 if is_sum else ranks

    def _scales(self, step: int, expected: ExpectedStep) -> list[float]:
        """Return the ratio of the first gradient of each micro-batch on each rank to that of the mean loss."""
        compared = ComparedStep(step, self.ranks, self.traces, expected).compared
        first: dict[tuple[int, int], float | None] = {}
        for each in compared:
            if each.tap.kind in ("output gradient", "input gradient") and each.expected is not None:
                first.setdefault((each.rank, each.tap.call), multiple(each.measured, each.expected))
        return [ratio for ratio in first.values() if ratio is not None]

    def _scaled(self, expected: ExpectedStep, scale: float, reduced: Sequence[str]) -> ExpectedStep:
        traces = [_with_scaled_gradients(trace, scale) for trace in expected.traces]
        return replace(expected, traces=traces, weight=1.0 / scale, reduced=reduced)

    def _reduction(self, step: int, expected: ExpectedStep, compared: ComparedStep) -> Location | None:
        unsharded = self._unsharded(step)
        if unsharded is not None:
            return unsharded
        found = super()._reduction(step, expected, compared)
        parameter = None if found is None else self.record.ranks[found.ranks[0]].parameters.get(found.name)
        if found is None or parameter is None or self._is_sharded(parameter):
            return found
        never = "no call of fully_shard reaches it"
        return with_fields(found, collective=never, called=self._sharding_line(), issued=None)

    def _unsharded(self, step: int) -> Location | None:
        """Return the first parameter that is not sharded any more as the optimizer is about to step."""
        prefix, found = f"step{step}: ", {facts.rank: facts.unsharded for facts in self.record.ranks}
        entries = [entry for each_rank in found.values() for entry in each_rank if entry.startswith(prefix)]
        names = [entry.removeprefix(prefix) for entry in entries]
        if not names:
            return None
        return self.location(
            "parameters",
            names[0],
            "layout when the optimizer steps",
            ranks=[rank for rank, each_rank in found.items() if entries[0] in each_rank],
            step=step,
            equals="is another than when the model was built: not resharded after backward",
            agrees="the gradients of each micro-batch agree",
            wrong=names,
        )

    def reduced_again(self, place: Location) -> str:
        """Return a sentence about a wrong gradient that the run has summed over ranks once more; empty if it has not.

        It is the sum of the shards of the ranks that shard its parameter.
        """
        kind = "clipped" if place.stage == "clipping" else "gradient"
        parameter = self.record.ranks[0].parameters.get(place.name)
        groups = [group for group in parameter.shard_ranks if len(group) > 1] if parameter else []
        expected = self.expected(place.step or 0).gradients.get(place.name)
        if not groups or expected is None:
            return ""
        shards = [shards_of(self.record, {place.name: expected}, rank)[place.name] for rank in groups[0]]
        measured = self.shards(f"step{place.step or 0}/{kind}/", 0).get(place.name)
        if measured is None or len({tuple(each.shape) for each in (*shards, measured)}) > 1:
            return ""
        if multiple(measured, torch.stack(shards).sum(0)) is None or multiple(measured, shards[0]) is not None:
            return ""
        return f"the gradient of {place.name}, which FSDP has reduced, is summed over ranks once more"

    def line_of_sum(self, place: Location) -> Code | None:
        """Return the line that issues the last all-reduce of as many elements as a rank holds of a gradient."""
        trace, numel = self.traces[0], self.record.ranks[0].parameters[place.name].local_numel
        found = [
            index
            for index, each in enumerate(self.collectives(0))
            if (each.step, each.kind, each.numel) == (place.step, "all_reduce", numel) and index < len(trace.issued)
        ]
        return trace.code(trace.issued[found[-1]]) if found else None

    def _updated(self, step: int, update: Update) -> Location | None:
        found = super()._updated(step, update)
        if found is None or found.name in self.record.ranks[found.ranks[0]].held:
            return found
        return with_fields(found, equals=f"{found.equals}: the optimizer does not hold the parameter")

    def decayed(self, place: Location) -> str:
        """Return a sentence about a wrong weight decay that leaves the tensor of a place; empty if none does."""
        step, rank, name = place.step or 0, place.ranks[0], place.name
        kinds = dict.fromkeys([place.quantity.removeprefix("optimizer state "), "parameter"])
        after = {kind: self.shards(f"after{step}/{kind}/", rank).get(name) for kind in kinds}
        measured = {kind: tensor for kind, tensor in after.items() if tensor is not None}
        before = {"parameter": self.shards(f"step{step}/parameter/", rank)[name]}

        def fits(prefix: str) -> bool:
            for kind, tensor in measured.items():
                other = self._tensors(f"{prefix}/step{step}/{kind}/").get(name)
                start = before.get(kind, torch.zeros_like(tensor))
                if other is None or deviation(tensor - start, other - start) > CLOSE:
                    return False
            return True

        if fits(f"rank{rank}"):
            return ""
        return next((told.format(name) for decay, told in _DECAYS.items() if fits(f"rank{rank}/{decay}")), "")

    def logged_loss(self, step: int, expected: ExpectedStep) -> Location | None:
        """Return a location if a rank has logged another loss than that of one process."""
        losses = {facts.rank: facts.losses[step] for facts in self.record.ranks if facts.losses}
        allowed = expected.loss_within * abs(expected.loss)
        wrong = [rank for rank, loss in losses.items() if not abs(loss - expected.loss) <= allowed]
        if not wrong:
            return None
        equals = states.number_clause(losses[wrong[0]], expected.loss, iter(()))
        called = self.line(step, wrong[0], "idle")
        return self.location("loss", "", "loss that is logged", ranks=wrong, step=step, equals=equals, called=called)

    @property
    def telling_norms(self) -> list[int]:
        """Ranks that log norms."""
        return [facts.rank for facts in self.record.ranks if facts.grad_norms]

    def logged_norm(self, step: int, rank: int) -> float | None:
        """Return the norm before clipping that a rank has logged; None if it was not finite."""
        norm = self.record.ranks[rank].grad_norms[step]
        return norm if math.isfinite(norm) else None

    def clipping(self, step: int, gradients: Shards) -> Clipping | None:
        """Return the options of clipping, with the bounds of the laws."""
        if not gradients:
            return None
        return Clipping(
            order=_NORM_ORDER,
            max_norm=self.evidence.reference.facts.max_norm,
            norm_within=tolerance.norm(gradients, order=_NORM_ORDER).value,
            gradients_within=clipping_bounds(gradients),
        )

    def updates(self, step: int) -> Iterator[Update | Location]:
        """Yield the tensors that the subject's optimizer leaves of full tensors, and of the shards of each rank."""
        errors = self._expectation.steps[step].updates
        kinds = {key.split("/", 1)[0] for key in errors} & {
            key.split("/")[1] for key in self.record.shards[0] if key.startswith(f"after{step}/")
        }
        before = "resumed" if self.record.cell.resumed and step == self.record.cell.saved_after else f"after{step - 1}"
        for kind in sorted(kinds, key=lambda kind: (kind != "parameter", kind)):
            within = {key.partition("/")[2]: e for key, e in errors.items() if key.startswith(f"{kind}/")}
            yield Update(
                kind=kind,
                before=f"step{step}/parameter/" if kind == "parameter" else f"{before}/{kind}/",
                after=f"after{step}/{kind}/",
                expected=[
                    shards_of(self.record, self._tensors(f"full/step{step}/{kind}/"), rank) for rank in self.ranks.all
                ],
                within={name: measured_bound(FP32_FACTOR, error, 0.0) for name, error in within.items()},
                by_shard=[self._tensors(f"rank{rank}/step{step}/{kind}/") for rank in self.ranks.all],
            )

    @cached_property
    def _expected_in(self) -> Path:
        """Directory of the steps as one process computes them."""
        tensors = weights_by_step(self.record, self.evidence.reference.facts.aliases)
        for prefix in self._optimizers_prefixes():
            tensors |= {f"{prefix}{name}": tensor for name, tensor in assembled(self.record, prefix).items()}
        with tempfile.TemporaryDirectory() as directory:
            weights = Path(directory) / "weights.safetensors"
            write_tensors(weights, tensors)
            return self._runs.expected_steps(self._cell, weights=weights, record=self.record.directory)

    def _optimizers_prefixes(self) -> list[str]:
        """Return the prefixes of the keys of all tensors of ranks from which the optimizer's steps follow."""
        prefixes = dict.fromkeys(f"{'/'.join(key.split('/')[:2])}/" for shards in self.record.shards for key in shards)
        return [each for each in prefixes if re.match(r"(step\d+/(parameter|clipped)|(after\d+|resumed)/\w+)/", each)]

    @cached_property
    def _expectation(self) -> Expectation:
        return msgspec.msgpack.decode((self._expected_in / FACTS_FILE).read_bytes(), type=Expectation)

    @cached_property
    def _expected_tensors(self) -> dict[str, Tensor]:
        return load_file(self._expected_in / TENSORS_FILE)

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): t for k, t in self._expected_tensors.items() if k.startswith(prefix)}


def _with_scaled_gradients(trace: Trace, scale: float) -> Trace:
    tensors = [
        tensor * scale if "gradient" in tap.kind else tensor
        for tap, tensor in zip(trace.taps, trace.tensors, strict=True)
    ]
    numbers = {
        when: [number._replace(value=scale * number.value) for number in found] for when, found in trace.numbers.items()
    }
    return replace(trace, tensors=tensors, numbers=numbers)


def _numbers(group: str) -> list[int]:
    """Return the ranks of a group as the log of collectives names it: `ranks 0,2`."""
    return [int(number) for number in group.removeprefix("ranks ").split(",") if number.isdigit()]


def _is_close(measured: float, expected: float) -> bool:
    return math.isclose(measured, expected, rel_tol=_SAME)


def _code(line: Line) -> Code:
    return Code(file=line.file, line=line.number, function=line.function)
