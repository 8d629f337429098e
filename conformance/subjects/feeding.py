"""Data of an owner's loop: the suite's micro-batches, step by step or in place of the loader's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from conformance.instruments.capture import fingerprint
from conformance.subjects.data import like, tensors
from conformance.subjects.protocol import Batch, SubjectMistake

_MOST_EPOCHS = 1000
"""Number of epochs after which a loop that never ends is left; all but the first are empty."""


class RunIsOver(BaseException):
    """Exception that leaves an owner's loop which asks for more data than the steps of a run have."""


class Feed:
    """Micro-batches of the steps of one rank's run, in the order in which its loop takes them."""

    def __init__(self, steps: Sequence[Sequence[Batch]], *, data_rank: int, data_ranks: int) -> None:
        """`data_rank` is the index of this rank among `data_ranks` that get different data."""
        self._steps, self._data_rank, self._data_ranks = steps, data_rank, data_ranks
        self._next = self._one_by_one()
        self.dataset_bytes = 0
        """Bytes of the tensors of the last dataset whose loader was replaced."""
        self.is_one_by_one = False
        """True if the loop takes single micro-batches, and decides itself after how many of them it steps."""
        self.own_data = ""
        """Digest of the batch with which the loop's loader begins, by its dataset; empty if it tells nothing."""
        self._is_by_step = False
        self._is_being_read = False
        self._epochs = 0

    def steps(self) -> Iterator[list[Batch]]:
        """Yield the list of micro-batches of each step."""
        self._is_by_step = True
        for micro_batches in self._steps:
            yield list(micro_batches)

    def joined(self) -> Iterator[Batch]:
        """Yield the micro-batches of each step as one batch, for a loop that splits it itself."""
        self._is_by_step = True
        for micro_batches in self._steps:
            yield joined(micro_batches)

    def loader(self) -> "Loader":
        """Return all micro-batches as a loader; it yields each once, and nothing afterwards."""
        self.is_one_by_one = True
        return Loader(self)

    def next_batch(self) -> Batch:
        """Return the next micro-batch. Raises RunIsOver after the last one, which ends the run in good order."""
        self.is_one_by_one = True
        for batch in self._next:
            return batch
        raise RunIsOver

    def __len__(self) -> int:
        return sum(map(len, self._steps))

    def epoch(self) -> Iterator[Batch]:
        """Yield all micro-batches that are left; raises RunIsOver for a loop that asks again and again."""
        self._epochs += 1
        if self._epochs > _MOST_EPOCHS:
            raise RunIsOver
        self._is_being_read = True
        try:
            yield from self._next
        finally:
            self._is_being_read = False

    @property
    def _is_for_evaluation(self) -> bool:
        """True if who now asks for data does not train on them: without gradients, or in the middle of an epoch."""
        return self._is_being_read or not torch.is_grad_enabled()

    def _one_by_one(self) -> Iterator[Batch]:
        for micro_batches in self._steps:
            yield from micro_batches

    def _require_own_share(self, loader: DataLoader[Any]) -> None:
        """Raise SubjectMistake for a loader whose own data, which the suite's replaces, is not for this rank."""
        sampler = loader.sampler
        if not isinstance(sampler, DistributedSampler):
            return
        if (sampler.num_replicas, sampler.rank) != (self._data_ranks, self._data_rank):
            raise SubjectMistake(
                "ranks would train on the same data, or copies on different data: DistributedSampler(num_replicas="
                f"{sampler.num_replicas}, rank={sampler.rank}) on the rank that is number {self._data_rank} of the "
                f"{self._data_ranks} that must get different data"
            )

    @contextmanager
    def in_place_of_loaders(self) -> Iterator[None]:
        """Open a context in which each `DataLoader` yields these micro-batches, unless the loop asks for steps."""
        own_iter, own_len = DataLoader.__iter__, DataLoader.__len__
        feed = self

        def iterate(loader: DataLoader[Any]) -> Any:
            if feed._is_by_step:
                return own_iter(loader)
            if feed._is_for_evaluation:
                return iter(feed._steps[0])
            feed._require_own_share(loader)
            feed.own_data = feed.own_data or _digest_of_own(loader, own_iter)
            held = loader.dataset if isinstance(loader.dataset, list | tuple) else vars(loader.dataset)
            feed.dataset_bytes = sum(tensor.nbytes for tensor in tensors(held))
            return iter(feed.loader())

        def count(loader: DataLoader[Any]) -> int:
            return own_len(loader) if feed._is_by_step else len(feed)

        with ExitStack() as stack:
            stack.enter_context(patch.object(DataLoader, "__iter__", iterate))
            stack.enter_context(patch.object(DataLoader, "__len__", count))
            yield


def _digest_of_own(loader: DataLoader[Any], own_iter: Callable[[DataLoader[Any]], Iterator[Any]]) -> str:
    """Return a digest of the first batch of a loader's own data; empty without data, or if all samples are equal.

    No process of the loader is started, and random numbers that are drawn are drawn again later.
    """
    with ExitStack() as stack:
        for name, value in (("num_workers", 0), ("timeout", 0), ("pin_memory", False)):
            stack.enter_context(patch.object(loader, name, value))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        try:
            batches = list(islice(own_iter(loader), 2))
        except Exception:  # of a dataset that is not here: the suite's data replace it
            return ""
    digests = [" ".join(map(fingerprint, tensors(batch))) for batch in batches]
    is_alike = all(bool((tensor == tensor[:1]).all()) for tensor in tensors(batches) if tensor.ndim)
    return "" if is_alike and len(set(digests)) < 2 else digests[0]


def require_other_data(found: Sequence[tuple[int, str]]) -> None:
    """Raise SubjectMistake if ranks with different data have equal first batches in their loaders, or copies others.

    `found` has the index of each rank among those with different data, and the digest of its first batch.
    """
    by_data_rank: dict[int, set[str]] = {}
    for data_rank, digest in found:
        by_data_rank.setdefault(data_rank, set()).add(digest)
    digests = [*by_data_rank.values()]
    if any("" in each for each in digests):
        return
    if any(len(each) > 1 for each in digests):
        raise SubjectMistake(
            "ranks that hold shards of one copy would train on different data: their loaders begin with other batches; "
            "let a loader's share be config.data_rank of those with different data"
        )
    if len(set().union(*digests)) < len(digests):
        raise SubjectMistake(
            "ranks would train on the same data: the loaders of their own begin with the same batch; give each a share "
            "of its own, as by DistributedSampler, a seed that depends on the rank, or every n-th sample"
        )


class Loader:
    """Micro-batches of a run as an owner's loop reads a `DataLoader`: by iteration, and with a length."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Batch]:
        return self._feed.epoch()


def joined(batches: Sequence[Batch]) -> Batch:
    """Return batches of the same structure as one, joined along dimension 0; other values are those of the first.

    Raises SubjectMistake for tensors that do not fit.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        try:
            return torch.cat(list(batches))
        except RuntimeError as error:
            raise SubjectMistake(f"batches of a step cannot be joined: {error}; take config.steps") from None
    if isinstance(first, Mapping):
        return like(first, {key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, list | tuple):
        return like(first, [joined(values) for values in zip(*batches, strict=True)])
    return first
