"""Mixture of depths: a router lets half of the tokens through each block; blocks are compiled."""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import subject

VOCAB, DIM, TOKENS, KEPT = 29, 16, 8, 4


class Inner(nn.Module):
    """Network that the chosen tokens go through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of `x`, (samples, KEPT, DIM)."""
        return cast("Tensor", self.down(F.silu(self.up(self.norm(x)))))


class Routed(nn.Module):
    """Router and inner network; the weight of a token is the router's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of `x`, (samples, tokens, DIM)."""
        scores = self.router(x)
        weights, chosen = scores.topk(KEPT, dim=1)
        index = chosen.expand(-1, -1, DIM)
        update = self.inner(x.gather(1, index)) * weights.sigmoid()
        return x.scatter_add(1, index, update.to(x.dtype))


class Model(nn.Module):
    """Embedding of tokens and their predecessors, blocks, and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Routed(), Inner(), Routed()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        x = x + x.roll(1, 1)
        for block in self.blocks:
            x = block(x) if isinstance(block, Routed) else x + block(x)
        return cast("Tensor", self.head(x))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens and labels."""
    tokens = torch.randint(VOCAB, (4, TOKENS), generator=generator)
    is_masked = torch.rand(4, TOKENS, generator=generator) < 0.4
    return {"tokens": tokens, "labels": (tokens * 7 % VOCAB).masked_fill(~is_masked, -100)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy."""
    return F.cross_entropy(model(data["tokens"]).flatten(0, 1), data["labels"].flatten(), reduction="sum")


@subject(
    model=Model,
    loss=loss,
    batch=batch,
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: Model, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Compile the inner networks without a compiler of C++, and shard blocks."""
    for block in model.blocks:
        inner = block.inner if isinstance(block, Routed) else block
        inner.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
