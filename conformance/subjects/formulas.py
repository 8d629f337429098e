"""Gradients of each micro-batch of each rank in one process, and the wrong means that trainers make of them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conformance.instruments.tensor_file import write_tensors
from conformance.oracles.reference import clip_factor, total_norm
from conformance.subjects import reference
from conformance.subjects.advancing import buffers_of, model_at, put_back
from conformance.subjects.data import all_micro_batches, micro_batches, samples, tensors, to_dtype
from conformance.subjects.facts import StepsJob
from conformance.subjects.protocol import Batch, Subject
from conformance.subjects.turns import Turn, turn_of

FACTS_FILE = "terms.msgpack"
TENSORS_FILE = "terms.safetensors"
"""Tensors by key: `stepN/rankR/microM/NAME` and, of the batches of a step at the weights before it, `stepN/stale/NAME`.

Where optimizers take turns, `stepN/left/NAME` are those of a mean that the turn before has left.
"""
Tensors = Mapping[str, Tensor]


class StepTerms(msgspec.Struct, frozen=True):
    """Sizes of the micro-batches of one step, by data-parallel rank and micro-batch."""

    counts: list[list[int | float]]
    """Numbers by which losses count: labels that are not ignored, samples, or their weights."""
    samples: list[list[int]]
    padded: list[list[int]]
    """Elements of the smallest tensor of the batch: labels, ignored ones included."""

    @property
    def total(self) -> float:
        """Number of all that counts in the step."""
        return sum(chain.from_iterable(self.counts))


def write_terms(subject: Subject, job: StepsJob) -> None:
    """Compute the gradients of each step at the weights of the run, in fp64 if the model can, into the directory."""
    directory, weights = Path(job.directory), load_file(job.weights)
    try:
        written, facts = _terms(subject, job, weights, torch.float64)
    except (RuntimeError, TypeError, NotImplementedError):
        written, facts = _terms(subject, job, weights, torch.float32)
    write_tensors(directory / TENSORS_FILE, {key: tensor.cpu().contiguous() for key, tensor in written.items()})
    (directory / FACTS_FILE).write_bytes(msgspec.msgpack.encode(facts))


def _terms(
    subject: Subject, job: StepsJob, weights: Tensors, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[StepTerms]]:
    workload, written, facts = job.cell.workload, dict[str, Tensor](), []
    for step in range(len(job.cell.accumulation)):
        model, advancing = _model_at(subject, job, weights, step, dtype)
        if model is None:
            break  # an earlier step is wrong
        batches = [micro_batches(subject, workload, step=step, data_rank=rank) for rank in range(workload.data_ranks)]
        buffers = buffers_of(model, advancing)
        for rank, own in enumerate(batches):
            put_back(model, buffers)
            for index, batch in enumerate(own):
                gradients = _gradients(turn_of(subject, step), model, batch, dtype)
                written |= {f"step{step}/rank{rank}/micro{index}/{name}": each for name, each in gradients.items()}
        stale = _model_at(subject, job, weights, step - 1, dtype)[0] if step else None
        turn, turn_before = turn_of(subject, step), turn_of(subject, step - 1)
        if stale is not None:
            for batch in all_micro_batches(subject, workload, step=step):
                _add(written, f"step{step}/stale/", _gradients(turn, stale, batch, dtype))
            before = all_micro_batches(subject, workload, step=step - 1) if turn != turn_before else []
            total = sum(subject.count(batch) for batch in before)
            for batch in before:
                left = _gradients(turn_before, stale, batch, dtype, of=turn)
                _add(written, f"step{step}/left/", {name: each / total for name, each in left.items()})
        facts.append(
            StepTerms(
                counts=[[subject.count(batch) for batch in own] for own in batches],
                samples=[[samples(batch) for batch in own] for own in batches],
                padded=[[min(each.numel() for each in tensors(batch)) for batch in own] for own in batches],
            )
        )
    return written, facts


def _model_at(
    subject: Subject, job: StepsJob, weights: Tensors, step: int, dtype: torch.dtype
) -> tuple[nn.Module | None, Sequence[str]]:
    """Return the model as it is before a step, None if its weights are not finite, and the buffers that advance."""
    model = reference.initial_model(subject, tied=job.cell.tied)
    advancing = model_at(model, subject, job.cell.workload, step=step, weights=weights)
    is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return reference.promoted(model, dtype) if is_finite else None, advancing


def _add(written: dict[str, Tensor], prefix: str, gradients: Tensors) -> None:
    """Add gradients to those that have been written below a prefix."""
    for name, gradient in gradients.items():
        key = f"{prefix}{name}"
        written[key] = written[key] + gradient if key in written else gradient


def _gradients(
    turn: Turn, model: nn.Module, batch: Batch, dtype: torch.dtype, *, of: Turn | None = None
) -> dict[str, Tensor]:
    """Return the gradients of the summed loss of a micro-batch in a turn, of the parameters that a turn trains."""
    model.zero_grad()
    torch.autograd.backward(turn.subject.loss(model, to_dtype(batch, dtype)))
    named = ((name, p.grad) for name, p in model.named_parameters() if (of or turn).trains(name))
    return {name: gradient.clone() for name, gradient in named if gradient is not None}


@dataclass(frozen=True, kw_only=True)
class Formula:
    """Wrong formula for gradients; the measured ones may be a multiple of its result."""

    id: str
    sentence: str
    """Gradients in words: `the mean of each rank's mean over its own 60 and 4 labels`."""
    by_rank: Sequence[Tensors]
    """Full gradients by data-parallel rank."""
    has_factor: Literal["no", "one", "by rank"] = "one"
    """Multiples that measured gradients may be: none, one for all ranks, or one for each."""


class StepFormulas:
    """Wrong formulas for the gradients of one step."""

    def __init__(self, terms: Tensors, facts: StepTerms, *, step: int) -> None:
        """`terms` are the tensors of `TENSORS_FILE`."""
        self.facts = facts
        self._terms = [
            [_below(terms, f"step{step}/rank{rank}/micro{index}/") for index in range(len(own))]
            for rank, own in enumerate(facts.counts)
        ]
        self._stale, self._left = (_below(terms, f"step{step}/{kind}/") for kind in ("stale", "left"))
        self.ranks, self.micro_batches = len(facts.counts), len(facts.counts[0])

    @cached_property
    def right(self) -> Tensors:
        """Gradients of the mean over all that counts in the step."""
        return self._weighted(lambda _rank, _index: 1.0 / self.facts.total)

    def all(self, *, shards: int, before: Tensors, limit: float) -> Iterator[Formula]:
        """Yield the formulas, the most frequent mistakes first.

        `shards` is the number of neighbouring ranks that have different shards: the others hold copies. `before` are
        full gradients that the step before left, or the last one of the same turn, and `limit` is that of clipping.
        Means of means are left out where all count alike: they are right.
        """
        yield self._formula("mean", "the mean over all that counts", self.right)
        yield from self._means()
        yield from self._lost_micro_batches()
        yield from self._unreduced(shards)
        if self._stale:
            stale = _sum([(1.0 / self.facts.total, self._stale)])
            told = "this step's data at the weights of the step before: weights are stale"
            yield self._formula("stale-weights", told, stale, has_factor="no")
        if self._left:
            left = _sum([(1.0, self.right), (1.0, self._left)])
            told = "this turn and those that the turn before has left in the same network: they are not set to zero"
            yield self._formula("left-by-another-turn", told, left, has_factor="no")
        if before:
            added = _sum([(1.0, self.right), (1.0, self._left), (1.0, before)])
            told = "this step and those that the step before has left: they are not set to zero"
            yield self._formula("not-zeroed", told, added, has_factor="no")
        told = "micro-batches that are clipped one by one, before the gradients of all are added"
        yield self._formula("clipped-one-by-one", told, self._clipped_one_by_one(limit), has_factor="no")

    def _means(self) -> Iterator[Formula]:
        """Yield means of means, in which ranks or micro-batches of different sizes have the same weight."""
        counts, own = self.facts.counts, self._own
        every = [count for each in counts for count in each]
        if len(set(own)) > 1:
            told = f"the mean of each rank's mean over its own {_joined(own)} {self.noun}"
            gradients = self._weighted(lambda rank, _index: 1.0 / (self.ranks * max(own[rank], 1)))
            yield self._formula("rank-means", told, gradients)
        if len(set(every)) > 1:
            told = f"the mean of the micro-batches' means over their own {_joined(every)} {self.noun}"
            gradients = self._weighted(lambda rank, index: 1.0 / (len(every) * max(counts[rank][index], 1)))
            yield self._formula("micro-batch-means", told, gradients)
        places = [sum(each) for each in zip(*counts, strict=True)]
        if len(set(places)) > 1:
            told = (
                f"the mean of the means of {len(places)} micro-batches, over {_joined(places)} {self.noun} of all ranks"
            )
            gradients = self._weighted(lambda _rank, index: 1.0 / (len(places) * max(places[index], 1)))
            yield self._formula("micro-batch-means-of-all", told, gradients)

    def _lost_micro_batches(self) -> Iterator[Formula]:
        places = {"last": self.micro_batches - 1, "first": 0} if self.micro_batches > 1 else {}
        for noun, place in places.items():
            told = f"the {noun} micro-batch alone"
            told += ": is gradient synchronisation off in the last micro-batch?" if noun == "first" else ""
            yield self._formula(f"{noun}-micro-batch", told, self._from_place(place))

    def _from_place(self, place: int) -> Tensors:
        return self._weighted(lambda _rank, index: float(index == place) / self.facts.total)

    def _clipped_one_by_one(self, limit: float) -> Tensors:
        """Return gradients that are clipped whenever those of a micro-batch have been added."""
        added: Tensors = {}
        for place in range(self.micro_batches):
            added = _sum([(1.0, added), (1.0, self._from_place(place))])
            factor = clip_factor(total_norm(added.values(), order=2.0), max_norm=limit)
            added = _sum([(factor, added)])
        return added

    def _unreduced(self, shards: int) -> Iterator[Formula]:
        """Yield gradients of some of the ranks' data alone."""
        told = "each rank's own data: they are not reduced over the ranks"
        own = [self._from_ranks([rank]) for rank in range(self.ranks)]
        yield Formula(id="own-data", sentence=told, by_rank=own, has_factor="by rank")
        if 1 < shards < self.ranks:
            told = f"the {shards} ranks that shard a copy: they are not reduced over the {self.ranks // shards} copies"
            groups = [range(rank - rank % shards, rank - rank % shards + shards) for rank in range(self.ranks)]
            by_rank = [self._from_ranks(group) for group in groups]
            yield Formula(id="own-copy", sentence=told, by_rank=by_rank, has_factor="by rank")
        for rank, gradients in enumerate(own):
            yield self._formula(f"rank-{rank}", f"the data of rank {rank} alone", gradients)

    def _from_ranks(self, ranks: Collection[int]) -> Tensors:
        count = max(sum(self._own[rank] for rank in ranks), 1)
        return self._weighted(lambda rank, _index: float(rank in ranks) / count)

    @property
    def _own(self) -> list[float]:
        return [sum(each) for each in self.facts.counts]

    @property
    def noun(self) -> str:
        """Noun for the units of `counts`."""
        return "samples" if self.facts.counts == self.facts.samples else "labels"

    def factors(self) -> Iterator[tuple[str, float, str]]:
        """Yield id, value and clause of each factor by which gradients may be a multiple of those of a mean.

        Of one micro-batch the factors of several have no effect; other steps and cells tell them apart.
        """
        ranks, micro, total = self.ranks, self.micro_batches, self.facts.total
        samples_, padded = (sum(map(sum, each)) for each in (self.facts.samples, self.facts.padded))
        yield "", 1.0, ""
        yield "ranks", ranks, f"{ranks} times as large: summed over the {ranks} ranks, not averaged"
        yield "1/ranks", 1 / ranks, f"1/{ranks} of their size: divided by the {ranks} ranks once too often"
        both = ranks * micro
        several = {
            "micro-batches": (micro, f"{micro} times as large: summed over the {micro} micro-batches, not averaged"),
            "1/micro-batches": (
                1 / micro,
                f"1/{micro} of their size: divided by the {micro} micro-batches once too often",
            ),
            "ranks x micro-batches": (
                both,
                f"{both} times as large: summed over ranks and micro-batches, not averaged",
            ),
            "1/(ranks x micro-batches)": (
                1 / both,
                f"1/{both} of their size: divided by ranks and micro-batches once too often",
            ),
        }
        for name, (value, told) in several.items():
            yield name, value, told if micro > 1 else ""
        if padded != total:
            told = f"divided by all {padded} labels, ignored ones included, and not by the {total} that count"
            yield "padded", total / padded, told
        if samples_ not in (total, padded):
            told = f"divided by the {samples_} samples, and not by the {total} {self.noun} that count"
            yield "samples", total / samples_, told
        told = f"of the sum over the {total} {self.noun} that count, which nothing divides"
        yield "sum", total, told
        yield "sum/ranks", total / ranks, told

    def own_norm(self, rank: int) -> float:
        """Return the 2-norm of the mean gradient of a rank's own data, before any reduction."""
        own = self._weighted(lambda each, _index: float(each == rank) * self.ranks / self.facts.total)
        return float(torch.stack([each.norm() for each in own.values()]).norm())

    def _formula(
        self, id_: str, sentence: str, gradients: Tensors, *, has_factor: Literal["no", "one"] = "one"
    ) -> Formula:
        return Formula(id=id_, sentence=sentence, by_rank=[gradients] * self.ranks, has_factor=has_factor)

    def _weighted(self, weight: Callable[[int, int], float]) -> Tensors:
        """Return the sum of the terms, each with its weight, a function of rank and micro-batch."""
        terms = ((rank, index, each) for rank, own in enumerate(self._terms) for index, each in enumerate(own))
        return _sum([(weight(rank, index), each) for rank, index, each in terms])


def _sum(terms: Iterable[tuple[float, Tensors]]) -> Tensors:
    """Return the weighted sum of gradients by name, in fp64."""
    total: dict[str, Tensor] = {}
    for weight, gradients in terms:
        for name, gradient in gradients.items():
            scaled = gradient.double() * weight
            total[name] = total[name] + scaled if name in total else scaled
    return total


def _below(named: Tensors, prefix: str) -> Tensors:
    return {key.removeprefix(prefix): each for key, each in named.items() if key.startswith(prefix)}


def _joined(numbers: Sequence[float]) -> str:
    *first, last = (f"{number:.10g}" for number in numbers)
    return f"{', '.join(first)} and {last}" if first else last
