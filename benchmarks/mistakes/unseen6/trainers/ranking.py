"""Order of search results by features (listwise softmax): lists of unequal length, with attention among their items.

conformance judge ranking.py:parallelize
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Optimizer

from conformance.subjects import ParallelConfig, subject

FEATURES, WIDTH, LONGEST = 7, 16, 6
Lists = tuple[Tensor, Tensor]


def lists(generator: torch.Generator, queries: int = 4) -> Lists:
    """Return features of items, and the gain of each; gains of -1 are padding."""
    features = torch.randn(queries, LONGEST, FEATURES, generator=generator)
    gains = torch.randint(0, 4, (queries, LONGEST), generator=generator).float()
    lengths = torch.randint(2, LONGEST + 1, (queries, 1), generator=generator)
    return features, gains.masked_fill(torch.arange(LONGEST) >= lengths, -1.0)


class Items(nn.Module):
    """Attention of the items of a list to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return features of the same shape."""
        normed = self.norm(x)
        attended, _weights = self.attention(normed, normed, normed, key_padding_mask=padding, need_weights=False)
        mixed: Tensor = x + attended * self.gate(x).sigmoid()
        return mixed


class Ranker(nn.Module):
    """Scores of the items of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.stem = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
        self.items = nn.ModuleList(Items() for _ in range(2))
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, padding: Tensor) -> Tensor:
        """Return scores, (queries, items)."""
        x = self.stem((features * self.scale).sign() * (features * self.scale).abs().log1p())
        for layer in self.items:
            x = layer(x, padding)
        scores: Tensor = self.score(x)
        return scores.squeeze(-1)


def list_loss(model: nn.Module, batch: Lists) -> Tensor:
    """Return the cross entropy of gains and scores, summed over queries."""
    features, gains = batch
    padding = gains < 0
    scores = model(features, padding).masked_fill(padding, float("-inf"))
    targets = (gains.clamp(min=0).exp2() - 1 + 1e-3).masked_fill(padding, 0.0)
    targets = targets / targets.sum(-1, keepdim=True)
    logs = scores.log_softmax(-1).masked_fill(padding, 0.0)
    losses: Tensor = -(targets * logs).sum(-1)
    return losses.sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adagrad."""
    return Adagrad(parameters, lr=0.02, initial_accumulator_value=0.1)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients by the norm of all, which is returned."""
    shards = [g.to_local() if isinstance(g := p.grad, DTensor) else g for p in parameters if p.grad is not None]
    square = torch.stack([shard.float().square().sum() for shard in shards if shard is not None]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_([shard for shard in shards if shard is not None], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@subject(
    model=Ranker,
    loss=list_loss,
    batch=lists,
    count=lambda batch: float(len(batch[0])),
    optimizer=make_optimizer,
    clip=clip,
)
def parallelize(model: Ranker, mesh: DeviceMesh, config: ParallelConfig) -> Ranker:
    """Shard each layer of items, then the rest."""
    for layer in model.items:
        fully_shard(layer, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
