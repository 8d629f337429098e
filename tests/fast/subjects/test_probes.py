"""Losses that are no sums, and counts of other things than their terms; and unusual ones that can be judged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from conformance.subjects import own_loop, subject
from conformance.subjects.cells import SubjectCell
from conformance.subjects.data import default_count, samples
from conformance.subjects.probes import require_sum
from conformance.subjects.protocol import Batch, SubjectMistake

VOCABULARY, IGNORED = 16, -100
TINY = 1e-3
"""Weight of auxiliary losses."""


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.GELU(), nn.Linear(8, VOCABULARY))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Samples with 2 to 6 labels that count."""
    tokens = torch.randint(VOCABULARY, (4, 8), generator=generator)
    lengths = torch.randint(2, 7, (4, 1), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1).masked_fill(torch.arange(8) >= lengths, IGNORED)}


def one_sample(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: tensor[:1] for name, tensor in batch(generator).items()}


def without_padding(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (4, 8), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def logits(model: nn.Module, batch: Batch) -> Tensor:
    computed: Tensor = model(batch["tokens"])
    return computed


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(logits(model, batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return summed(model, batch) / default_count(batch)


def in_fp32(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(logits(model, batch).float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def sum_of_sample_means(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch["labels"]
    losses = cross_entropy(logits(model, batch).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    means: Tensor = losses.sum(1) / (labels != IGNORED).sum(1)
    return means.sum()


def shifted(model: nn.Module, batch: Batch) -> Tensor:
    """Loss that leaves out the first label of each sample, as those of transformers do."""
    return cross_entropy(logits(model, batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def by_longest(model: nn.Module, batch: Batch) -> Tensor:
    return summed(model, batch) / int((batch["labels"] != IGNORED).sum(1).max())


def balance(model: nn.Module, batch: Batch) -> Tensor:
    """Auxiliary loss of the batch, as of experts that are used unequally; it is no sum."""
    return logits(model, batch).softmax(-1).mean((0, 1)).square().sum()


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    features = normalize(logits(model, batch).mean(1), dim=1)
    return cross_entropy(features @ features.T, torch.arange(len(features)), reduction="sum")


def padded(batch: Batch) -> int:
    return batch["labels"].numel()  # type: ignore[no-any-return]


def one(batch: Batch) -> int:
    return 1


def notes(loss: Callable[[nn.Module, Batch], Tensor], **options: Any) -> str:
    declared: Any = subject(**{"model": model, "loss": loss, "batch": batch, **options})(
        lambda model, mesh, config: model
    )
    return "; ".join(require_sum(declared, SubjectCell().workload, dtype=torch.float64))


@pytest.mark.parametrize(
    ("loss", "options", "problem"),
    [
        (mean, {}, "loss() is a mean over the batch: "),
        (mean, {"batch": one_sample}, "loss() is a mean over the batch: "),
        (mean, {"batch": without_padding}, "loss() is a mean over the batch: "),
        (mean, {"count": samples}, "loss() is a mean over the batch: "),
        (lambda m, b: mean(m, b) * len(b["labels"]), {}, "loss() is no sum, or lets samples depend on each other"),
        (lambda m, b: mean(m, b) * padded(b), {}, "loss() is no sum, or lets samples depend on each other"),
        (lambda m, b: summed(m, b) / padded(b), {}, "loss() is a mean over the batch: "),
        (sum_of_sample_means, {}, "loss() is a mean over the labels of each sample"),
        (sum_of_sample_means, {"batch": one_sample}, "loss() is a mean over the labels of each sample"),
        (by_longest, {}, "loss() is no sum, or lets samples depend on each other"),
        (contrastive, {}, "loss() is no sum, or lets samples depend on each other"),
        (lambda m, b: summed(m, b) + 8 * balance(m, b), {}, "loss() is no sum, or lets samples depend on each other"),
        (mean, {"count": one}, "a mean of means weighs these unequally"),
        (summed, {"count": padded}, "count() is 32 for a batch in which"),
    ],
)
def test_a_loss_that_is_no_sum_of_what_counts_is_refused(loss: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(SubjectMistake) as raised:
        notes(loss, **options)
    assert problem in str(raised.value)
    assert "count" in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (summed, {}),
        (in_fp32, {}),
        (summed, {"batch": one_sample}),
        (summed, {"count": samples}),
        (summed, {"count": one}),
        (sum_of_sample_means, {"count": samples}),
        (lambda m, b: mean(m, b) * default_count(b), {}),
        (lambda m, b: summed(m, b) / 32, {}),
        (lambda m, b: -summed(m, b), {}),
    ],
)
def test_a_sum_is_judged(loss: Any, options: dict[str, Any]) -> None:
    assert not notes(loss, **options)


@pytest.mark.parametrize(
    ("loss", "options", "note"),
    [
        (shifted, {}, "count() counts the first label of each sample, which loss() leaves out"),
        (lambda m, b: summed(m, b) + balance(m, b), {}, "a term of loss() is no sum over samples"),
        (
            lambda m, b: summed(m, b) + TINY * logits(m, b).logsumexp(-1).square().sum(),
            {},
            "a term of loss() does not depend on the labels",
        ),
        (mean, {"count": one, "batch": without_padding}, "count() is 1, so that each micro-batch counts alike"),
    ],
)
def test_an_unusual_loss_is_told(loss: Any, options: dict[str, Any], note: str) -> None:
    assert note in notes(loss, **options)


def test_a_loss_of_fixed_size_is_refused() -> None:
    def four_samples(model: nn.Module, batch: Batch) -> Tensor:
        return summed(model, {name: tensor.view(4, 8) for name, tensor in batch.items()})

    with pytest.raises(SubjectMistake, match="raises for another number of samples"):
        notes(four_samples, batch=without_padding)


def order(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and the places in which they are read."""
    return torch.randint(VOCABULARY, (4, 8), generator=generator), torch.rand(4, 8, generator=generator).argsort(1)


def first_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    read = batch[0].gather(1, batch[1])
    return cross_entropy(model(read[:, 0]), read[:, 1], reduction="sum")


def next_tokens_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def require_sum_of_loop(loss: Any, **options: Any) -> None:
    declared = own_loop(model=model, loss=loss, batch=order, **options)(lambda config: None)
    require_sum(declared, SubjectCell().workload, dtype=torch.float64)


def test_integers_that_may_be_labels_or_not_must_be_declared_by_a_loop() -> None:
    with pytest.raises(SubjectMistake, match="its second tensor has 32 integers for 4 samples"):
        require_sum_of_loop(first_token_loss)
    require_sum_of_loop(first_token_loss, count=samples)
    require_sum_of_loop(next_tokens_loss)  # in which a label of -100 is left out
