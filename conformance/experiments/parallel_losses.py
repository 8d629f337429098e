"""Samples of `loss_parallel`: cross-entropy of logits that are sharded by classes, with all reductions and options."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from conformance.experiments.parallel_samples import Letters, ParallelSample, integers

_IGNORED = -100
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", a class ignored": {"ignore_index": 1},
    ", smoothed": {"label_smoothing": 0.25},
}


def loss_samples(dims: int) -> Iterator[ParallelSample]:
    """Yield the samples for a mesh of so many dimensions; of two, the first shards the batch."""
    for reduction in ("mean", "sum", "none"):
        for option, values in _OPTIONS.items():
            for weighted in ("", ", weighted"):
                name = f"loss_parallel, {reduction}{option}{weighted}"
                yield _loss(name, dims, _Loss(reduction=reduction, is_weighted=bool(weighted), **values))
        loss = _Loss(reduction=reduction)
        yield _loss(f"loss_parallel of sequences, {reduction}", dims, loss, rest=(3,))
        yield _loss(f"loss_parallel, padded, {reduction}", dims, loss, ignored="some")
        yield _loss(f"loss_parallel, padded, weighted, {reduction}", dims, _Loss(reduction, True), ignored="some")
        yield _loss(f"loss_parallel, padding alone, {reduction}", dims, loss, ignored="all")
    yield ParallelSample(
        "loss_parallel left by an error",
        lambda _: _AfterAnError(),
        lambda sizes: [_logits(sizes["a"], 4)],
        ((Shard(0), *(Replicate(),) * (dims - 1)),),
        None,
        exact=False,
        takes_plain=False,
    )
    classes = (*[Shard(0)] * (dims - 1), Shard(1))
    yield ParallelSample(
        "loss_parallel of another loss",
        lambda _: _OfLogProbabilities(),
        lambda sizes: [_logits(2 * sizes["b"], sizes["a"]), integers(2 * sizes["b"], sizes["a"], seed=3).double()],
        (classes, classes),
        None,
        exact=False,
        takes_plain=False,
        tries_empty=False,  # as of other losses but the plain one, see `_loss`
        within=_loss_parallel,
    )


class _Loss(nn.Module):
    """Cross-entropy; the weight of a class is a replicated tensor."""

    def __init__(self, reduction: str, is_weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.is_weighted = is_weighted
        self.options = {"reduction": reduction, **options}

    @property
    def is_plain(self) -> bool:
        """True without any option."""
        return self.options == {"reduction": "mean"} and not self.is_weighted

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        weight = None
        if self.is_weighted:
            weight = 1.0 + torch.arange(logits.size(1), dtype=logits.dtype, device=logits.device) % 3
        return nn.functional.cross_entropy(logits, target, weight=weight, **self.options)


class _OfLogProbabilities(nn.Module):
    """Weighted sum of log-probabilities, as of distillation."""

    def forward(self, logits: Tensor, weights: Tensor) -> Tensor:
        return (logits.log_softmax(1) * weights).sum()


class _AfterAnError(nn.Module):
    """Logarithm of softmax after an error inside of `loss_parallel`; the input if that is not over."""

    def forward(self, x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError), loss_parallel():
            raise ZeroDivisionError
        try:
            return x.log_softmax(-1)
        except ValueError:
            return x
        finally:
            _end_loss_parallel()


def _loss(name: str, dims: int, loss: _Loss, *, rest: tuple[int, ...] = (), ignored: str = "none") -> ParallelSample:
    """Return a sample whose targets are classes, or padding: in the first half of the batch, or everywhere.

    Without options alone it is tried where some ranks have no classes: torch hangs there, see
    findings/loss_of_rank_without_classes.py.
    """

    def tensors(sizes: Letters) -> list[Tensor]:
        count, classes = 2 * sizes["b"], sizes["a"]
        target = integers(count, *rest, low=0, high=classes - 1, seed=3).long()
        target[: {"none": 0, "some": count // 2, "all": count}[ignored]] = _IGNORED
        return [_logits(count, classes, *rest), target]

    batch = [Shard(0)] * (dims - 1)
    return ParallelSample(
        name,
        lambda _: loss,
        tensors,
        ((*batch, Shard(1)), (*batch, Replicate())),
        None,
        exact=False,
        takes_plain=False,
        tries_empty=loss.is_plain,
        within=_loss_parallel,
    )


def _logits(*shape: int) -> Tensor:
    return integers(*shape, seed=2).double() / 2


@contextmanager
def _loss_parallel() -> Iterator[None]:
    """Compute losses in parallel, also until an error, after which torch goes on doing so."""
    try:
        with loss_parallel():
            yield
    except Exception:
        _end_loss_parallel()
        raise


def _end_loss_parallel() -> None:
    with loss_parallel():
        pass
