"""Data of subjects: the micro-batches of each data-parallel rank, and tensors inside of batches."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.subjects.cells import Workload
from conformance.subjects.protocol import Batch, Subject, SubjectMistake
from conformance.subjects.turns import turns_of

IGNORED_LABEL = -100
"""Label of tokens that do not count, by convention of `torch.nn.functional.cross_entropy`."""


def micro_batches(subject: Subject, workload: Workload, *, step: int, data_rank: int) -> list[Batch]:
    """Return the micro-batches of one data-parallel rank in a step; they depend on nothing else.

    Of uneven ones the last of every second rank is halved: a loop that joins them and splits the result by size makes
    as many of them on each rank, whose collectives would not fit otherwise.
    """
    training_step = step // len(turns_of(subject))
    made = [_batch(subject, training_step, data_rank, index) for index in range(workload.accumulation[step])]
    return [*made[:-1], halved(made[-1])] if workload.uneven and data_rank % 2 else made


def all_micro_batches(subject: Subject, workload: Workload, *, step: int) -> list[Batch]:
    """Return the micro-batches of all ranks in a step."""
    ranks = range(workload.data_ranks)
    return [batch for rank in ranks for batch in micro_batches(subject, workload, step=step, data_rank=rank)]


def _batch(subject: Subject, step: int, data_rank: int, index: int) -> Batch:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * data_rank + index)
    return subject.batch(generator)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch with a function applied to each of its tensors; other values are left alone."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return like(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return like(batch, [map_tensors(function, value) for value in batch])
    return batch


def like(batch: Batch, values: Any) -> Batch:
    """Return a list or tuple of the type of a batch, which may have names for its values, or a mapping, with others.

    Of mappings a `UserDict`, such as the encodings of tokenizers, keeps its type: its keys are attributes, too.
    """
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    if isinstance(batch, Mapping):
        return type(batch)(values) if isinstance(batch, UserDict) else values
    return type(batch)(values)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch, of any shape and dtype."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


def samples(batch: Batch) -> int:
    """Return the number of samples of a batch: the size of dimension 0, in which all tensors agree.

    Raises SubjectMistake if they do not, or if there is no tensor.
    """
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors(batch)}
    if len(sizes) != 1 or not max(sizes):
        raise SubjectMistake(
            f"batch() returned {_described(batch)}: give a tensor, or a dict, list or tuple of tensors "
            "whose dimension 0 is the samples"
        )
    return sizes.pop()


def halved(batch: Batch) -> Batch:
    """Return the first half of the samples of a batch."""
    kept = (samples(batch) + 1) // 2
    return map_tensors(lambda tensor: tensor[:kept], batch)


def permuted(batch: Batch, *, seed: int) -> Batch:
    """Return a batch with its samples in another order."""
    order = torch.randperm(samples(batch), generator=torch.Generator().manual_seed(seed))
    return map_tensors(lambda tensor: tensor[order], batch)


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch with its floating-point tensors in a dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device; the host does not wait for the copies, which would hide races."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def default_count(batch: Batch) -> int:
    """Return the number of labels that are not ignored, or of samples if the batch has no labels, see `labels_of`."""
    labels = labels_of(batch)
    return samples(batch) if labels is None else int((labels != IGNORED_LABEL).sum())


def labels_of(batch: Batch) -> Tensor | None:
    """Return the integer labels of a batch, of any shape: its key `labels`, or the second of two tensors."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else _second(batch)
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def _second(batch: Batch) -> object:
    return batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None


def _described(batch: Batch) -> str:
    shapes = [tuple(tensor.shape) for tensor in tensors(batch)]
    return f"a {type(batch).__name__} with tensors of shapes {shapes}"
