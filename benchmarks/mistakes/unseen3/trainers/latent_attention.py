"""Language model with latent attention (MLA) and a second head that tells the token after the next, by Muon and AdamW.

conformance judge latent_attention.py:train
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

VOCAB, DIM, HEADS, LATENT, CONTENT, ROTARY, TOKENS = 39, 20, 2, 8, 6, 4, 9
Text = dict[str, Tensor]


def angles() -> Tensor:
    """Return rotations (TOKENS, ROTARY / 2), complex."""
    rates = 10000.0 ** -(torch.arange(ROTARY // 2) / (ROTARY // 2))
    return torch.polar(torch.ones(TOKENS, ROTARY // 2), torch.arange(TOKENS)[:, None] * rates)


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Return a tensor of the shape of `x`, (..., tokens, ROTARY)."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * rotations[: x.shape[-2]]
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """Keys and values are made from one small vector of each token; positions are in a key that heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, HEADS * (CONTENT + ROTARY), bias=False)
        self.down, self.norm = nn.Linear(DIM, LATENT + ROTARY, bias=False), nn.RMSNorm(LATENT, eps=1e-6)
        self.up, self.out = (
            nn.Linear(LATENT, HEADS * 2 * CONTENT, bias=False),
            nn.Linear(HEADS * CONTENT, DIM, bias=False),
        )

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        content, place = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([CONTENT, ROTARY], -1)
        latent, shared = self.down(x).split([LATENT, ROTARY], -1)
        key, value = self.up(self.norm(latent)).unflatten(-1, (HEADS, 2, -1)).permute(3, 0, 2, 1, 4)
        shared = rotated(shared, rotations)[:, None].expand(-1, HEADS, -1, -1)
        query = torch.cat([content, rotated(place, rotations)], -1)
        y = F.scaled_dot_product_attention(query, torch.cat([key, shared], -1), value, is_causal=True)
        return cast("Tensor", self.out(y.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = LatentAttention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        x = x + self.attention(self.norm1(x), rotations)
        return cast("Tensor", x + self.down(F.relu(self.up(self.norm2(x))).square()))


class Model(nn.Module):
    """Two layers, a head, and a layer more for the second token ahead."""

    rotations: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.further, self.join = Layer(), nn.Linear(2 * DIM, DIM, bias=False)
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("rotations", angles(), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (samples, tokens, VOCAB) of next tokens, and (samples, tokens - 1, VOCAB) of those behind."""
        embedded = self.embedding(tokens)
        x = embedded
        for layer in self.layers:
            x = layer(x, self.rotations)
        further = self.further(self.join(torch.cat([x[:, :-1], embedded[:, 1:]], -1)), self.rotations)
        return self.head(self.norm(x)), self.head(self.norm(further))


def texts(generator: torch.Generator) -> Text:
    """Return tokens, and labels of which padding does not count."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    ends = torch.randint(3, TOKENS + 1, (4, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= ends, -100)}


def text_loss(model: nn.Module, text: Text) -> Tensor:
    """Return the cross entropy of the next tokens, and a third of that of those behind them, summed."""
    near, far = (logits.float().flatten(0, 1) for logits in model(text["tokens"]))
    labels = text["labels"]
    loss = F.cross_entropy(near, labels.flatten(), reduction="sum")
    return loss + F.cross_entropy(far, labels[:, 1:].flatten(), reduction="sum") / 3


def make_optimizers(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return Muon for matrices but those of tokens, and AdamW for the others."""
    listed = list(parameters)
    matrices = [p for p in listed if p.ndim == 2 and VOCAB not in p.shape]
    others = [p for p in listed if p.ndim != 2 or VOCAB in p.shape]
    return [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01), AdamW(others, lr=2e-3)]


@own_loop(
    model=Model,
    loss=text_loss,
    batch=texts,
    optimizer=make_optimizers,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with the mean over the tokens of a step."""
    model = cast("Model", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for layer in [*model.layers, model.further]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizers = make_optimizers(model.parameters())
    for micro_batches in config.steps:
        tokens = torch.tensor(float(sum(int((text["labels"] != -100).sum()) for text in micro_batches)))
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for index, text in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = text_loss(model, text) * dist.get_world_size() / tokens
            torch.autograd.backward(loss)
            total += loss.detach() / dist.get_world_size()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        dist.all_reduce(total)
        yield {"loss": total, "grad_norm": norm}
