"""Losses with all reductions and options."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from conformance.experiments.operator_samples import Sample, indices, sample

_REDUCTIONS = ("mean", "sum", "none")


def losses() -> Iterator[Sample]:
    """Yield a sample of each loss for each reduction and option."""
    for reduction in _REDUCTIONS:
        yield from _of_two_tensors(reduction)
        yield from _of_classes(reduction)
        yield from _of_more_tensors(reduction)
    yield sample("kl_div, batchmean", partial(functional.kl_div, reduction="batchmean"), *_LOG, exact=False)
    yield sample(
        "mse_loss of rows", lambda x, y: functional.mse_loss(x, y, reduction="none").mean(1), "a b", "a b", exact=False
    )
    yield sample("sum of squares over count", lambda x, y: ((x - y) ** 2).sum() / x.numel(), "a b", "a b", exact=False)


_LOG = ("a b", "a b distribution")


def _of_two_tensors(reduction: str) -> Iterator[Sample]:
    for name in ["l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss"]:
        call = partial(getattr(functional, name), reduction=reduction)
        # No two numbers are equal, where the gradient of l1_loss jumps.
        yield sample(f"{name}, {reduction}", call, "a b", "a b unit", exact=False)
    call = partial(functional.mse_loss, reduction=reduction)
    yield sample(f"mse_loss of three dims, {reduction}", call, "a b 3", "a b 3", exact=False)
    for name in ("soft_margin_loss", "hinge_embedding_loss"):
        call = partial(getattr(functional, name), reduction=reduction)
        yield sample(f"{name}, {reduction}", call, "a b", "a b signs", exact=False)
    call = partial(functional.binary_cross_entropy, reduction=reduction)
    yield sample(f"binary_cross_entropy, {reduction}", call, "a b unit", "a b unit", exact=False)
    yield sample(
        f"binary_cross_entropy, weighted, {reduction}",
        lambda x, y, w: functional.binary_cross_entropy(x, y, w, reduction=reduction),
        *("a b unit", "a b unit", "a b positive"),
        exact=False,
    )
    call = partial(functional.binary_cross_entropy_with_logits, reduction=reduction)
    yield sample(f"binary_cross_entropy_with_logits, {reduction}", call, "a b", "a b unit", exact=False)
    yield sample(
        f"binary_cross_entropy_with_logits, pos_weight, {reduction}",
        lambda x, y, w: functional.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction=reduction),
        *("a b", "a b unit", "b positive"),
        exact=False,
    )
    yield sample(f"kl_div, {reduction}", partial(functional.kl_div, reduction=reduction), *_LOG, exact=False)
    call = partial(functional.kl_div, reduction=reduction, log_target=True)
    yield sample(f"kl_div of logarithms, {reduction}", call, "a b", "a b", exact=False)
    call = partial(functional.poisson_nll_loss, reduction=reduction)
    yield sample(f"poisson_nll_loss, {reduction}", call, "a b", "a b positive", exact=False)


def _of_classes(reduction: str) -> Iterator[Sample]:
    for name in ("cross_entropy", "nll_loss"):
        operator = getattr(functional, name)
        options: dict[str, dict[str, Any]] = {"": {}, ", ignored": {"ignore_index": 1}}
        if name == "cross_entropy":
            options |= {", smoothed": {"label_smoothing": 0.25}}
        for text, option in options.items():
            call = partial(operator, reduction=reduction, **option)
            yield sample(f"{name}{text}, {reduction}", call, "a 4", "a labels", exact=False)
        yield sample(
            f"{name}, weighted, {reduction}",
            lambda x, y, w, operator=operator: operator(x, y, weight=w, reduction=reduction),
            *("a 4", "a labels", "4 positive"),
            exact=False,
        )
        call = partial(operator, reduction=reduction)
        yield sample(f"{name} of sequences, {reduction}", call, "a 4 b", "a b labels", exact=False)
    call = partial(functional.cross_entropy, reduction=reduction)
    yield sample(f"cross_entropy of probabilities, {reduction}", call, "a b", "a b distribution", exact=False)
    call = partial(functional.multi_margin_loss, reduction=reduction)
    yield sample(f"multi_margin_loss, {reduction}", call, "a 4", "a labels", exact=False)
    call = partial(functional.multilabel_margin_loss, reduction=reduction)
    yield sample(f"multilabel_margin_loss, {reduction}", call, "a 4", "a 4 labels", exact=False)
    call = partial(functional.multilabel_soft_margin_loss, reduction=reduction)
    yield sample(f"multilabel_soft_margin_loss, {reduction}", call, "a b", "a b unit", exact=False)


def _of_more_tensors(reduction: str) -> Iterator[Sample]:
    call = partial(functional.gaussian_nll_loss, reduction=reduction)
    yield sample(f"gaussian_nll_loss, {reduction}", call, "a b", "a b", "a b positive", exact=False)
    call = partial(functional.margin_ranking_loss, reduction=reduction)
    yield sample(f"margin_ranking_loss, {reduction}", call, "a", "a", "a signs", exact=False)
    call = partial(functional.cosine_embedding_loss, reduction=reduction)
    yield sample(f"cosine_embedding_loss, {reduction}", call, "a b positive", "a b positive", "a signs", exact=False)
    call = partial(functional.triplet_margin_loss, reduction=reduction)
    yield sample(f"triplet_margin_loss, {reduction}", call, "a b", "a b", "a b", exact=False)
    yield sample(f"ctc_loss, {reduction}", partial(_ctc, reduction=reduction), "4 a b", exact=False)


def _ctc(x: Tensor, *, reduction: str) -> Tensor:
    """Return the loss of sequences of four steps whose only label is 1."""
    count = x.size(1)
    targets, steps, labels = indices(x, *[1] * count).view(-1, 1), indices(x, *[4] * count), indices(x, *[1] * count)
    return functional.ctc_loss(x.log_softmax(-1), targets, steps, labels, reduction=reduction)
