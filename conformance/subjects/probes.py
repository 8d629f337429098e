"""Contract of `loss` and `count`, probed in one process: the loss is a sum, and `count` is the number of its terms.

Losses are divided by counts in the reference and, where the suite supplies the loop, on the ranks alike: with a mean
both would be wrong in the same way, and no comparison would see it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.subjects.advancing import buffers_kept
from conformance.subjects.cells import Workload
from conformance.subjects.data import (
    IGNORED_LABEL,
    all_micro_batches,
    default_count,
    halved,
    labels_of,
    map_tensors,
    permuted,
    samples,
    to_dtype,
)
from conformance.subjects.evidence import FP32_FACTOR
from conformance.subjects.protocol import Batch, Subject, SubjectMistake
from conformance.subjects.reference import ORDERS, RANDOM_ABOVE, SEED, initial_model, promoted

_PROBED = 2
"""Number of batches that are probed."""
_ROUNDING = 1e-5
"""Relative deviation that is not told from rounding, for models whose own error shows in no order of samples."""
_MEAN_ABOVE = 0.5
"""Excess of the losses of two halves of the labels over that of all, relative to that, from which on the loss is a mean
over labels: a mean's is about 1, a sum's 0. Less is a term that no label enters, such as an auxiliary loss."""
_ADVICE = (
    "return the sum over all that count() counts: reduction='sum', or the mean times its divisor; with transformers "
    "model(**batch, num_items_in_batch=1).loss"
)


def require_sum(subject: Subject, workload: Workload, *, dtype: torch.dtype) -> list[str]:
    """Raise SubjectMistake for a loss that is no sum over samples or labels, or for a count of other labels.

    Returns sentences about a loss that is unusual and can be judged. `dtype` is that of the more accurate process.
    """
    probe = _Probe(subject, workload, dtype)
    found = [note for batch in probe.batches[:_PROBED] for note in probe.notes(batch)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Sum:
    """Loss of some samples, or labels, beside the number that it is if the loss is a sum."""

    measured: float
    expected: float
    bound: float

    @property
    def deviation(self) -> float:
        """Deviation relative to the expected number; 0 within the bound on rounding. NaN is infinitely far off."""
        difference = abs(self.measured - self.expected)
        if difference <= self.bound:
            return 0.0
        return difference / abs(self.expected) if difference < float("inf") and self.expected else float("inf")


class _Probe:
    """Loss of the initial model for batches that are made of those of a workload."""

    def __init__(self, subject: Subject, workload: Workload, dtype: torch.dtype) -> None:
        model = initial_model(subject, tied=workload.tied)
        self._models = {each: promoted(model, each) for each in (dtype, torch.float32)}
        self._subject, self._dtype = subject, dtype
        steps = range(len(workload.accumulation))
        self.batches = [batch for step in steps for batch in all_micro_batches(subject, workload, step=step)]

    def notes(self, batch: Batch) -> Iterator[str]:
        """Yield sentences about the losses of one batch; raises SubjectMistake."""
        self._require_known_labels(batch)
        twice, halves = self._same_twice(batch), self._both_halves(batch)
        labels = self._labels(batch)
        half_labels = self._both_label_halves(batch, labels) if labels is not None else None
        if not any((twice, halves, half_labels)):
            raise SubjectMistake("loss() raises for another number of samples than that of batch(): allow any number")
        worst = max((found for found in (twice, halves) if found), key=lambda found: found.deviation, default=None)
        if worst and worst.deviation > RANDOM_ABOVE and self._counts_batches(batch):
            yield self._about_batches()
            return
        for found, text in ((twice, "the same samples twice"), (halves, "two halves of a batch")):
            if found and found.deviation:
                _require_small(found, text)
                yield (
                    f"a term of loss() is no sum over samples ({text}), such as an auxiliary loss of a micro-batch; it "
                    "is divided by count() like the rest"
                )
                break
        if labels is not None:
            yield from self._about_labels(batch, labels, half_labels)

    def _loss(self, batch: Batch, dtype: torch.dtype | None = None) -> float:
        torch.manual_seed(SEED)
        dtype = dtype or self._dtype
        model = self._models[dtype]
        with buffers_kept(model):
            return float(self._subject.loss(model, to_dtype(batch, dtype)).detach())

    def _tried(self, batch: Batch) -> float | None:
        """Return the loss of a batch that `batch()` has not made; None if the model or the loss cannot take it."""
        try:
            return self._loss(batch)
        except Exception:
            return None

    def _bound(self, batch: Batch) -> float:
        """Return the bound on rounding of the loss of a batch as a sum in any order, see `evidence.FP32_FACTOR`."""
        exact = self._loss(batch)
        orders = [batch, *(permuted(batch, seed=order) for order in range(1, ORDERS))]
        own = max(abs(self._loss(each, torch.float32) - exact) for each in orders)
        return max(FP32_FACTOR * own, _ROUNDING * abs(exact))

    def _summed(self, batches: list[Batch], expected: float | None, bound: float) -> _Sum | None:
        """Return the sum of the losses of some batches, which MUST be a number; None if a loss cannot be computed."""
        losses = [self._tried(each) for each in batches]
        known = [loss for loss in losses if loss is not None]
        return _Sum(sum(known), expected, bound) if expected is not None and len(known) == len(losses) else None

    def _same_twice(self, batch: Batch) -> _Sum | None:
        """Compare half of the samples twice, a batch of about the usual size, with twice their loss."""
        half = halved(batch)
        once = self._tried(half)
        doubled = map_tensors(lambda tensor: torch.cat([tensor, tensor]), half)
        return self._summed([doubled], 2 * once, 2 * self._bound(half)) if once is not None else None

    def _both_halves(self, batch: Batch) -> _Sum | None:
        """Compare both halves of the samples with all; None for one sample."""
        count = samples(halved(batch))
        if count == samples(batch):
            return None
        rest = map_tensors(lambda tensor: tensor[count:], batch)
        return self._summed([halved(batch), rest], self._loss(batch), self._bound(batch))

    def _require_known_labels(self, batch: Batch) -> None:
        """Raise SubjectMistake for a loop without `count=` whose second tensor may be labels, or something else."""
        labels = labels_of(batch)
        is_declared = self._subject.count is not default_count or not getattr(self._subject, "divides_losses", False)
        if labels is None or is_declared or isinstance(batch, Mapping) or labels.numel() == samples(batch):
            return
        halves = self._both_label_halves(batch, labels)
        if halves is None or halves.deviation:
            raise SubjectMistake(
                f"what does a batch count by? its second tensor has {labels.numel()} integers for {samples(batch)} "
                f"samples, and loss() does not leave out those that are {IGNORED_LABEL}, as it does labels: declare "
                "count=, a function of a batch, by whose sum the loop divides"
            )

    def _counts_batches(self, batch: Batch) -> bool:
        """Return whether `count` is 1 for a batch of any number of samples: it counts micro-batches."""
        several = map_tensors(lambda tensor: torch.cat([tensor, tensor]), batch)
        return self._subject.count(batch) == self._subject.count(several) == 1

    def _about_batches(self) -> str:
        """Return the sentence about a mean over micro-batches; raises SubjectMistake if they differ in labels."""
        numbers = {default_count(batch) for batch in self.batches}
        if len(numbers) > 1:
            raise SubjectMistake(
                f"loss() is no sum, and count() is 1 for batches of {min(numbers)} to {max(numbers)} labels that "
                f"count: a mean of means weighs these unequally: {_ADVICE}"
            )
        return "count() is 1, so that each micro-batch counts alike: loss() is not judged as a sum over its samples"

    def _labels(self, batch: Batch) -> Tensor | None:
        """Return the labels of a batch if some are ignored in any batch, which says how the loss ignores them."""
        labels = [labels_of(each) for each in self.batches]
        is_masked = any(each is not None and bool((each == IGNORED_LABEL).any()) for each in labels)
        return labels_of(batch) if is_masked else None

    def _both_label_halves(self, batch: Batch, labels: Tensor) -> _Sum | None:
        """Compare the losses of every second label and of the others; None if no sample has two labels that count.

        Other samples are left out: the mean over no label may raise.
        """
        counting = (labels != IGNORED_LABEL).flatten(1) if labels.ndim > 1 else torch.zeros(len(labels), 1)
        rows = counting.sum(1) > 1
        if not bool(rows.any()):
            return None
        kept = map_tensors(lambda tensor: tensor[rows], batch)
        is_second = (counting[rows].cumsum(1) % 2 == 0).view_as(labels[rows])
        halves = [_without(kept, ignored) for ignored in (is_second, ~is_second)]
        return self._summed(halves, self._tried(kept), self._bound(kept))

    def _about_labels(self, batch: Batch, labels: Tensor, half_labels: _Sum | None) -> Iterator[str]:
        """Yield sentences about the labels that the loss and `count` leave out; raises SubjectMistake."""
        count, is_second = self._subject.count, torch.arange(labels.numel()).view_as(labels) % 2 == 1
        if count(_without(batch, is_second)) == count(batch):
            if count(batch) == labels.numel() > default_count(batch):
                raise SubjectMistake(
                    f"count() is {labels.numel()} for a batch in which {default_count(batch)} labels count: the others "
                    f"are {IGNORED_LABEL}; return the number of labels that are not, or of samples"
                )
            return
        if half_labels and half_labels.deviation > _MEAN_ABOVE:
            raise SubjectMistake(
                f"loss() is a mean over the labels of each sample: {half_labels.measured:.6g} for two halves of the "
                f"labels, {half_labels.expected:.6g} for all, whereas count() counts labels: {_ADVICE}"
            )
        if half_labels and half_labels.deviation:
            yield "a term of loss() does not depend on the labels; it is divided by their number like the rest"
        for name, column in (("first", 0), ("last", -1)) if labels.ndim > 1 else ():
            if self._leaves_out(batch, labels, column):
                yield (
                    f"count() counts the {name} label of each sample, which loss() leaves out: losses are divided by "
                    "more than their number"
                )

    def _leaves_out(self, batch: Batch, labels: Tensor, column: int) -> bool:
        """Return whether `count` counts a column of labels that the loss does not depend on."""
        is_ignored = torch.zeros_like(labels, dtype=torch.bool)
        is_ignored[:, column] = True
        without = _without(batch, is_ignored)
        is_counted = self._subject.count(without) < self._subject.count(batch)
        return is_counted and self._tried(without) == self._loss(batch)


def _require_small(found: _Sum, text: str) -> None:
    """Raise SubjectMistake for a loss that is far from a sum over samples."""
    if found.deviation > RANDOM_ABOVE:
        is_mean = abs(found.measured - found.expected / 2) <= found.bound
        kind = "a mean over the batch" if is_mean else "no sum, or lets samples depend on each other"
        raise SubjectMistake(
            f"loss() is {kind}: {found.measured:.6g} for {text}, which should be {found.expected:.6g}: {_ADVICE}"
        )


def _without(batch: Batch, is_ignored: Tensor) -> Batch:
    """Return a batch some of whose labels are ignored."""
    labels = labels_of(batch)
    return map_tensors(
        lambda tensor: tensor.masked_fill(is_ignored, IGNORED_LABEL) if tensor is labels else tensor, batch
    )
