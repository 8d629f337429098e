"""Parts of point clouds (PointNet): a learnt rotation with a penalty, the largest of all points, and a class for each.

conformance judge point_clouds.py:parallelize
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adamax, Optimizer

from conformance.subjects import ParallelConfig, subject

POINTS, WIDTH, PARTS = 12, 16, 5
Clouds = tuple[Tensor, Tensor]


def clouds(generator: torch.Generator, count: int = 4) -> Clouds:
    """Return points, and the part of each."""
    points = torch.randn(count, POINTS, 3, generator=generator)
    return points, torch.randint(PARTS, (count, POINTS), generator=generator)


class Shared(nn.Module):
    """Two layers that all points share."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(inputs, WIDTH, 1), nn.Conv1d(WIDTH, outputs, 1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of points, (clouds, outputs, points)."""
        features: Tensor = self.second(self.drop(F.relu(self.norm(self.first(x)))))
        return features


class Rotation(nn.Module):
    """Matrix by which the points of a cloud are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.points = Shared(3, WIDTH)
        self.matrix = nn.Linear(WIDTH, 9)

    def forward(self, points: Tensor) -> Tensor:
        """Return a matrix for each cloud."""
        flat: Tensor = self.matrix(self.points(points).amax(-1))
        return flat.view(-1, 3, 3) + torch.eye(3, dtype=flat.dtype, device=flat.device)


class PointNet(nn.Module):
    """Logits of parts, and the penalty of a cloud's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation()
        self.local, self.whole = Shared(3, WIDTH), Shared(WIDTH, 2 * WIDTH)
        self.head = Shared(3 * WIDTH, PARTS)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, (clouds, parts, points), and penalties."""
        matrices = self.rotation(points.transpose(1, 2))
        local = F.relu(self.local((points @ matrices).transpose(1, 2)))
        whole = self.whole(local).amax(-1, keepdim=True).expand(-1, -1, points.shape[1])
        identity = torch.eye(3, dtype=matrices.dtype, device=matrices.device)
        penalties = (matrices @ matrices.transpose(1, 2) - identity).square().sum((1, 2))
        return self.head(torch.cat([local, whole], 1)), penalties


def part_loss(model: nn.Module, batch: Clouds) -> Tensor:
    """Return the cross entropy, the mean over a cloud's points, and the penalty, summed over clouds."""
    points, parts = batch
    logits, penalties = model(points)
    loss: Tensor = F.cross_entropy(logits, parts, reduction="none").mean(-1).sum() + 0.01 * penalties.sum()
    return loss


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adamax."""
    return Adamax(parameters, lr=2e-3)


@subject(
    model=PointNet,
    loss=part_loss,
    batch=clouds,
    count=lambda batch: float(len(batch[0])),
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: PointNet, mesh: DeviceMesh, config: ParallelConfig) -> PointNet:
    """Shard each part of the network."""
    for module in (model.rotation, model.local, model.whole, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=config.mixed_precision)
    return model
