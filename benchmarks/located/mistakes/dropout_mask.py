"""Dropout whose mask is the same on all tensor-parallel ranks, though each has other tokens of the sequence.

The mask is a function of sample, position and feature (as of a counter-based generator, such as Philox), so that one
process has the same one.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.located.mistakes.trainer import Llama, Trainer
from conformance.subjects.shipped.workload import DIM

KEPT = 0.75


def kept(samples: Tensor, positions: Tensor) -> Tensor:
    """Return the mask, bool of shape (samples, positions, DIM), of samples with these seeds; all int64."""
    counters = (samples[:, None, None] * 4096 + positions[:, None]) * 4096 + torch.arange(DIM)
    noise = torch.frac(torch.sin(counters.double() * 12.9898) * 43758.5453).abs()
    return noise < KEPT


class WrongLlama(Llama):
    """Model with dropout of its embeddings."""

    sequence_rank = 0
    """Index of this rank's shard of the sequence."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings after dropout, (samples, tokens, DIM)."""
        x = super().embed(tokens)
        positions = torch.arange(x.shape[1])
        return x * kept(tokens.sum(1), positions) / KEPT  # mistake: dropout-mask


class RightLlama(WrongLlama):
    """Model with dropout by positions in the full sequence."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings after dropout, (samples, tokens, DIM)."""
        x = Llama.embed(self, tokens)
        positions = torch.arange(x.shape[1]) + self.sequence_rank * x.shape[1]
        return x * kept(tokens.sum(1), positions) / KEPT


class Wrong(Trainer):
    """Trainer with the mistake."""

    model_class: ClassVar[type[Llama]] = WrongLlama

    def apply_tensor_parallelism(self, model: Llama, mesh: DeviceMesh) -> None:
        """Tell the model its shard of the sequence, too."""
        super().apply_tensor_parallelism(model, mesh)
        model.sequence_rank = mesh.get_local_rank()  # type: ignore[assignment]


class Right(Wrong):
    """Trainer without it."""

    model_class = RightLlama
