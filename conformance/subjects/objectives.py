"""Objectives that many models are trained for, each a batch and a loss: `@subject(model=..., **language_model(64))`.

Sizes are small, since a subject is judged with a small model. Losses are sums over labels or samples, in fp32.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.subjects.data import IGNORED_LABEL
from conformance.subjects.protocol import Batch


class Objective(TypedDict):
    """Arguments `batch` and `loss` of `subject` and of `own_loop`."""

    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def language_model(vocabulary: int, *, length: int = 8, samples: int = 4) -> Objective:
    """Return the objective of a model that predicts the next token: `model(input_ids)` gives logits, or has `.logits`.

    A batch has `input_ids` and `labels`, int64 of shape (samples, length): labels are those of the next tokens, and
    those behind each sample's random end are -100. The loss is the summed cross entropy of the others.
    """

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator)
        ends = torch.randint(1, length + 1, (samples, 1), generator=generator)
        labels = tokens[:, 1:].masked_fill(torch.arange(length) >= ends, IGNORED_LABEL)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = _output(model(batch["input_ids"]), "logits").float()
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    return {"batch": batch, "loss": loss}


def classification(shape: Sequence[int], classes: int, *, samples: int = 4) -> Objective:
    """Return the objective of a classifier: `model(inputs)` gives logits (samples, classes), or has `.logits`.

    A batch is a pair of inputs, normal fp32 of shape (samples, *shape), and of their labels, int64 of shape (samples,).
    """

    def batch(generator: torch.Generator) -> Batch:
        inputs = torch.randn(samples, *shape, generator=generator)
        return inputs, torch.randint(classes, (samples,), generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(_output(model(batch[0]), "logits").float(), batch[1], reduction="sum")

    return {"batch": batch, "loss": loss}


def denoising(shape: Sequence[int], *, steps: int = 100, samples: int = 4) -> Objective:
    """Return the objective of a diffusion model: `model(noisy, step)` gives the noise, or has `.sample`.

    A batch has `noisy` and `noise`, normal fp32 of shape (samples, *shape), and `step`, int64 of shape (samples,) below
    `steps`. The loss is the sum over samples of the mean square error.
    """

    def batch(generator: torch.Generator) -> Batch:
        noisy, noise = (torch.randn(samples, *shape, generator=generator) for _ in range(2))
        return {"noisy": noisy, "noise": noise, "step": torch.randint(steps, (samples,), generator=generator)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        errors = _output(model(batch["noisy"], batch["step"]), "sample").float() - batch["noise"]
        total: Tensor = errors.square().flatten(1).mean(1).sum()
        return total

    return {"batch": batch, "loss": loss}


def _output(returned: Any, name: str) -> Tensor:
    """Return the tensor of a model's output: the output itself, or its field of this name."""
    output: Tensor = getattr(returned, name, returned)
    return output
