"""Language model on packed documents, which do not see each other: capped logits, norms on both sides, and a z-loss.

conformance judge packed.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from conformance.subjects import ParallelConfig, subject

VOCAB, DIM, HEAD, HIDDEN, TOKENS, LAYERS, CAP = 38, 16, 4, 24, 12, 2, 10.0


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return logits that stay between -cap and cap."""
    return cap * torch.tanh(logits / cap)


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Return features (samples, heads, tokens, HEAD) turned by their places in documents, (samples, tokens)."""
    speeds = 100.0 ** -(torch.arange(HEAD // 2) * 2 / HEAD)
    angles = (places[..., None] * speeds)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Heads of which two share a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.key, self.value = nn.Linear(DIM, DIM // 2, bias=False), nn.Linear(DIM, DIM // 2, bias=False)

    def forward(self, x: Tensor, places: Tensor, is_seen: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.query, self.key, self.value))
        q, k = rotated(q, places), rotated(k, places)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        scores = capped(q @ k.transpose(-1, -2) / HEAD**0.5, CAP)
        shares = scores.float().masked_fill(~is_seen[:, None], float("-inf")).softmax(-1).to(v.dtype)
        return cast("Tensor", self.out((shares @ v).transpose(1, 2).flatten(2)))


class Network(nn.Module):
    """Gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return cast("Tensor", self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x)))


class Block(nn.Module):
    """Attention and network, with a norm before and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(4))
        self.attention, self.network = Attention(), Network()

    def forward(self, x: Tensor, places: Tensor, is_seen: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        x = x + self.norm2(self.attention(self.norm1(x), places, is_seen))
        return cast("Tensor", x + self.norm4(self.network(self.norm3(x))))


class Model(nn.Module):
    """Embedding, blocks that are computed again in backward, and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, document: Tensor, places: Tensor) -> Tensor:
        """Return capped logits (samples, TOKENS, VOCAB)."""
        is_seen = (document[:, :, None] == document[:, None, :]) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        x = self.embedding(tokens) * DIM**0.5
        for block in self.blocks:
            x = checkpoint(block, x, places, is_seen, use_reentrant=False)
        return capped(self.head(self.norm(x)), 2 * CAP)


def packs(generator: torch.Generator) -> dict[str, Tensor]:
    """Return rows of documents; the last token of a document tells nothing of the next one's first."""
    tokens = torch.randint(VOCAB, (3, TOKENS), generator=generator)
    is_first = (torch.rand(3, TOKENS, generator=generator) < 0.25) | (torch.arange(TOKENS) == 0)
    index = torch.arange(TOKENS).expand(3, -1)
    starts = torch.where(is_first, index, 0).cummax(1).values
    ends_here = is_first.roll(-1, 1) | (index == TOKENS - 1)
    return {
        "tokens": tokens,
        "document": is_first.cumsum(1),
        "places": index - starts,
        "labels": tokens.roll(-1, 1).masked_fill(ends_here, -100),
    }


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return cross entropy, and a pull of each normaliser to 1, summed over tokens with a label."""
    logits = model(batch["tokens"], batch["document"], batch["places"]).float()
    entropy = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    is_counted = batch["labels"] != -100
    return cast("Tensor", entropy + 1e-3 * (logits.logsumexp(-1).square() * is_counted).sum())


def divide(model: Model, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism; between blocks each rank has a part of each row."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    plan: dict[str, Any] = {
        **{f"norm{index}": SequenceParallel(use_local_output=index % 2 == 0) for index in range(1, 5)},
        "attention": gathered,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "network": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"network.{name}": ColwiseParallel() for name in ("gate", "up")},
        "network.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    outer: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)


@subject(
    model=Model,
    loss=token_loss,
    batch=packs,
    optimizer=lambda parameters: AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    meshes=["dp2", "hsdp2x2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Model, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Divide each block by features and rows, and shard it; the last layers are one group."""
    data_mesh = mesh
    if config.mesh == "dp2-tp2":
        divide(model, mesh["tp"])
        data_mesh = mesh["dp_shard"]
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh, mp_policy=config.mixed_precision)
    fully_shard([model.norm, model.head], mesh=data_mesh, mp_policy=config.mixed_precision, reshard_after_forward=False)
    fully_shard(model, mesh=data_mesh, mp_policy=config.mixed_precision)
    return model
