"""Small decoder of plain torch modules, its batches and its loss, for trainers that take any model."""

import importlib.metadata
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu
from torch.optim import Optimizer

from conformance.subjects.data import default_count
from conformance.subjects.decorated import sgd
from conformance.subjects.protocol import Batch

VOCAB_SIZE, DIM, LAYERS, SEQ_LEN, SAMPLES = 64, 32, 2, 12, 4
IGNORED = -100


class FeedForward(nn.Module):
    """Residual layer of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        return x + self.down(gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def feature_scale() -> Tensor:
    """Return the content of the decoder's buffer, of shape (DIM,)."""
    return torch.linspace(0.5, 1.5, DIM)


class Decoder(nn.Module):
    """Embedding, layers and head; a buffer that is computed and not loaded scales the features."""

    scale: Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, DIM)
        self.layers = nn.ModuleList(FeedForward() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", feature_scale(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB_SIZE) of tokens (samples, tokens)."""
        x = self.embedding(tokens)
        x = x * self.scale.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def tokens_and_labels(generator: torch.Generator) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`, int64 of shape (SAMPLES, SEQ_LEN); some labels are ignored."""
    tokens = torch.randint(VOCAB_SIZE, (SAMPLES, SEQ_LEN + 1), generator=generator)
    lengths = torch.randint(2, SEQ_LEN + 1, (SAMPLES, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(SEQ_LEN) >= lengths, IGNORED)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels.contiguous()}


def decoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed loss of a model that takes tokens and returns logits."""
    return token_loss(model(batch["input_ids"]), batch["labels"])


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy of the labels that count."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard layers over features, and activations between them over the sequence; every parameter is on the mesh."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def shared_by_rank0(directory: str) -> str:
    """Return the directory that rank 0 gives."""
    shared = [directory]
    dist.broadcast_object_list(shared)
    return shared[0]


class OfDecoder:
    """Methods of `protocol.Subject` about model, data and optimizer, for adapters that train `Decoder`."""

    packages: tuple[str, ...] = ()
    """Packages that are judged, besides torch."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and of the packages."""
        return {name: importlib.metadata.version(name) for name in ("torch", *self.packages)}

    def model(self, *, tied: bool) -> nn.Module:
        """Return the decoder."""
        return Decoder(tied=tied)

    def batch(self, generator: torch.Generator) -> Batch:
        """Return tokens and labels."""
        return tokens_and_labels(generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss."""
        return decoder_loss(model, batch)

    def count(self, batch: Batch) -> int:
        """Return the number of labels that count."""
        return default_count(batch)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimizer."""
        return sgd(parameters)
