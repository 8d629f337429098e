"""Vision and language: a frozen tower, a trained projection, adapters (DoRA) in the decoder, and trained embeddings.

    conformance judge vision_language.py:train

Own loop. Some texts have no image, and some micro-batches none at all; all ranks compute the tower nevertheless.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, RANK, PATCHES, PIXELS, TOKENS, LAYERS = 36, 16, 3, 4, 12, 7, 2
Samples = dict[str, Tensor]


class AdaptedLinear(nn.Module):
    """Frozen layer with a trained length of each row, and a trained direction of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.down, self.up = (
            nn.Parameter(torch.randn(RANK, inputs) * 0.2),
            nn.Parameter(torch.randn(outputs, RANK) * 0.1),
        )
        self.length = nn.Parameter(self.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (..., outputs)."""
        length = torch.linalg.vector_norm(self.weight + self.up @ self.down, dim=1).detach()
        scale = self.length / length
        return cast("Tensor", (F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)) * scale)


class Tower(nn.Module):
    """Encoder of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(2))

    def forward(self, patches: Tensor) -> Tensor:
        """Return features (samples, PATCHES, 12)."""
        x = self.patch(patches)
        for layer in self.layers:
            x = x + layer(x)
        return cast("Tensor", x)


class Layer(nn.Module):
    """Attention whose queries and values are adapted, and a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = AdaptedLinear(DIM, DIM), nn.Linear(DIM, DIM), AdaptedLinear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        for module in (self.norm1, self.norm2, self.key, self.out, self.mlp):
            module.requires_grad_(False)

    def forward(self, x: Tensor, is_seen: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (2, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.mlp(self.norm2(x)))


class VisionLanguage(nn.Module):
    """Tower, projection and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower().requires_grad_(False)
        self.projection = nn.Sequential(nn.Linear(12, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, patches: Tensor, has_image: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (samples, TOKENS, VOCAB); a sample without an image does not see its patches."""
        features = self.projection(self.tower(patches)) * has_image[:, None, None]
        x = torch.cat([features.to(self.head.weight.dtype), self.embedding(tokens)], 1)
        length = x.shape[1]
        is_hidden = torch.arange(length).lt(PATCHES) & ~has_image.bool()[:, None]
        is_seen = torch.ones(length, length, dtype=torch.bool).tril() & ~is_hidden[:, None]
        is_seen = is_seen | torch.eye(length, dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, is_seen[:, None])
        return cast("Tensor", self.head(self.norm(x[:, PATCHES:])))


def samples(generator: torch.Generator) -> Samples:
    """Return texts of which half of the micro-batches have images with some."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    ends = torch.randint(2, TOKENS + 1, (4, 1), generator=generator)
    chances = torch.rand(2, 4, generator=generator)
    return {
        "patches": torch.randn(4, PATCHES, PIXELS, generator=generator),
        "has_image": ((chances[0] < 0.6) & (chances[1, 0] < 0.5)).float(),
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= ends, -100),
    }


def text_loss(model: nn.Module, batch: Samples) -> Tensor:
    """Return the cross entropy, summed over tokens."""
    logits = model(batch["patches"], batch["has_image"], batch["tokens"])
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW of the trained parameters."""
    return AdamW([p for p in parameters if p.requires_grad], lr=3e-3, weight_decay=0.0)


@own_loop(
    model=VisionLanguage,
    loss=text_loss,
    batch=samples,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with the mean over all tokens of a step."""
    model = cast("VisionLanguage", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    fully_shard(model.tower, **options)
    fully_shard(model.projection, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    world = dist.get_world_size()
    for micro_batches in config.steps:
        labels = torch.cat([batch["labels"].flatten() for batch in micro_batches])
        tokens = (labels != -100).sum().to(torch.int64)
        dist.all_reduce(tokens)
        summed = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index + 1 == len(micro_batches))
            loss = text_loss(model, batch)
            torch.autograd.backward(loss * world / tokens.item())
            summed += loss.detach()
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(summed)
        yield {"loss": summed.item() / tokens.item(), "grad_norm": norm}
