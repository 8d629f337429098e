"""Encoder whose one layer computes several times (ALBERT), with a loss by token and one by sentence.

conformance judge albert.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import subject

VOCAB, SMALL, DIM, HEADS, TOKENS, DEPTH, PAD = 34, 8, 20, 4, 9, 3, 0


class Layer(nn.Module):
    """Attention and network, each followed by a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM); padding is not attended to."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=is_token[:, None, None])
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        return cast("Tensor", self.norm2(x + self.down(F.gelu(self.up(x)))))


class Albert(nn.Module):
    """Factorised embedding, a shared layer, a head for tokens that is tied to it, and one for the sentence."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, SMALL), nn.Embedding(TOKENS, SMALL)
        self.grow, self.shrink = nn.Linear(SMALL, DIM), nn.Linear(DIM, SMALL)
        self.layer = Layer()
        self.token_head = nn.Linear(SMALL, VOCAB)
        self.sentence_head = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 2))
        if tied:
            self.token_head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of tokens, (samples, TOKENS, VOCAB), and of the order of sentences, (samples, 2)."""
        x = self.grow(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        for _ in range(DEPTH):
            x = self.layer(x, tokens != PAD)
        return self.token_head(self.shrink(x)), self.sentence_head(x[:, 0])


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens, of which some are hidden and must be told, and whether the sentences are in order."""
    tokens = torch.randint(2, VOCAB, (4, TOKENS), generator=generator)
    is_token = torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (4, 1), generator=generator)
    is_hidden = (torch.rand(4, TOKENS, generator=generator) < 0.4) & is_token
    is_hidden[:, 1] = True
    return {
        "tokens": tokens.masked_fill(is_hidden, 1) * is_token,
        "labels": tokens.masked_fill(~is_hidden, -100),
        "order": torch.randint(2, (4,), generator=generator),
    }


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of hidden tokens and of the order of sentences, summed."""
    tokens, order = model(data["tokens"])
    by_token = F.cross_entropy(tokens.float().flatten(0, 1), data["labels"].flatten(), reduction="sum")
    return by_token + 0.5 * F.cross_entropy(order.float(), data["order"], reduction="sum")


@subject(
    model=Albert,
    tied_model=lambda: Albert(tied=True),
    loss=loss,
    batch=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Albert, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard the layer, which is gathered each time that it computes, the sentence's head, and the rest."""
    options = {"mesh": mesh, "mp_policy": config.mixed_precision}
    fully_shard(model.layer, **options)
    fully_shard(model.sentence_head, **options)
    fully_shard(model, **options)
    return model
