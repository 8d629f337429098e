"""Reward model: of two answers the better one must score higher; lower layers are frozen, and both answers pass alone.

    conformance judge reward.py:train

Own loop that splits each rank's batch into micro-batches itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, TOKENS, FROZEN, LAYERS = 40, 16, 8, 1, 3
Answers = dict[str, Tensor]


class Layer(nn.Module):
    """Causal attention with one key for all heads, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM // 4), nn.Linear(DIM, DIM // 4)
        self.out, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (answers, tokens, DIM)."""
        y = self.norm1(x)
        query = self.query(y).unflatten(-1, (4, -1)).transpose(1, 2)
        key, value = (each[:, None].expand(-1, 4, -1, -1) for each in (self.key(y), self.value(y)))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.silu(self.up(self.norm2(x)))))


class Reward(nn.Module):
    """Score of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.score = nn.LayerNorm(DIM), nn.Linear(DIM, 1, bias=False)
        self.embedding.requires_grad_(False)
        self.layers[:FROZEN].requires_grad_(False)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Return scores (answers,), of answers whose lengths are (answers,)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        last = x[torch.arange(len(x)), length - 1]
        return cast("Tensor", self.score(self.norm(last)).squeeze(-1))


def answers(generator: torch.Generator) -> Answers:
    """Return pairs of answers, and by how much the first is better."""
    tokens = torch.randint(VOCAB, (2, 4, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (2, 4), generator=generator)
    return {
        "better": tokens[0],
        "better_length": lengths[0],
        "worse": tokens[1],
        "worse_length": lengths[1],
        "margin": torch.rand(4, generator=generator),
    }


def ranking_loss(model: nn.Module, batch: Answers) -> Tensor:
    """Return the loss of Bradley and Terry with a margin, and a pull of scores to zero, summed over pairs."""
    better = model(batch["better"], batch["better_length"]).float()
    worse = model(batch["worse"], batch["worse_length"]).float()
    loss = -F.logsigmoid(better - worse - batch["margin"]) + 0.01 * (better + worse).square()
    return cast("Tensor", loss.sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum that is damped."""
    return SGD((p for p in parameters if p.requires_grad), lr=0.03, momentum=0.9, dampening=0.1, weight_decay=1e-4)


@own_loop(
    model=Reward,
    loss=ranking_loss,
    batch=answers,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train the layers that are not frozen."""
    model = cast("Reward", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    fully_shard([model.embedding, *model.layers[:FROZEN]], **options)
    for layer in model.layers[FROZEN:]:
        fully_shard(layer, **options)
    fully_shard([model.norm, model.score], **options)
    fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    for joined in config.joined_steps:
        pairs = torch.tensor(float(len(joined["margin"])))
        dist.all_reduce(pairs)
        total = torch.zeros(())
        starts = range(0, len(joined["margin"]), 4)
        for start in starts:
            cast("FSDPModule", model).set_requires_gradient_sync(start == starts[-1])
            loss = ranking_loss(model, {name: each[start : start + 4] for name, each in joined.items()}) / pairs
            torch.autograd.backward(loss, torch.tensor(float(dist.get_world_size())))
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        yield {"loss": total, "grad_norm": norm}
