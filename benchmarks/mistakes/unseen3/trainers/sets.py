"""Set transformer with induced points: sets of unequal size in nested batches, and a class for each set.

conformance judge sets.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import ParallelConfig, subject

MEMBERS, FEATURES, DIM, INDUCED, CLASSES = 8, 5, 12, 3, 4


class Attend(nn.Module):
    """Attention of one set to another, in one file of weights for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM, bias=False)

    def forward(self, x: Tensor, y: Tensor, is_member: Tensor | None = None) -> Tensor:
        """Return a tensor of the shape of `x`, (sets, members, DIM)."""
        q = self.query(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.key_value(y).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        mask = None if is_member is None else is_member[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return cast("Tensor", self.norm(x + F.mish(self.out(attended))))


class SetTransformer(nn.Module):
    """Members attend to induced points, which attend to members; seeds pool them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(FEATURES, DIM), nn.PReLU())
        self.induced = nn.ParameterList(nn.Parameter(torch.randn(INDUCED, DIM) * 0.5) for _ in range(2))
        self.gather = nn.ModuleList(Attend() for _ in range(2))
        self.spread = nn.ModuleList(Attend() for _ in range(2))
        self.seed = nn.Parameter(torch.randn(1, DIM))
        self.pool = Attend()
        self.head = nn.Bilinear(DIM, 2, CLASSES)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """Return logits (sets, CLASSES), of members, a mask and two numbers for each set."""
        members, (is_member, numbers) = inputs["members"], inputs["about"]
        x = self.embed(members)
        for induced, gather, spread in zip(self.induced, self.gather, self.spread, strict=True):
            points = gather(induced.expand(len(x), -1, -1), x, is_member)
            x = spread(x, points)
        pooled = self.pool(self.seed.expand(len(x), -1, -1), x, is_member)
        return cast("Tensor", self.head(pooled[:, 0], numbers.to(pooled.dtype)))


def sets(generator: torch.Generator) -> dict[str, Any]:
    """Return sets of one to MEMBERS members."""
    sizes = torch.randint(1, MEMBERS + 1, (6, 1), generator=generator)
    return {
        "inputs": {
            "members": torch.randn(6, MEMBERS, FEATURES, generator=generator),
            "about": [torch.arange(MEMBERS) < sizes, torch.randn(6, 2, generator=generator)],
        },
        "class": torch.randint(CLASSES, (6,), generator=generator),
    }


def focal_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the focal loss, summed over sets."""
    logs = F.log_softmax(model(batch["inputs"]).float(), -1).gather(1, batch["class"][:, None])
    return (-((1 - logs.exp()) ** 2) * logs).sum()


@subject(
    model=SetTransformer,
    loss=focal_loss,
    batch=sets,
    count=lambda batch: len(batch["class"]),
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: SetTransformer, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard pairs of attentions."""
    for gather, spread in zip(model.gather, model.spread, strict=True):
        fully_shard([gather, spread], mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model.pool, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
