"""Vision transformer with registers, under HSDP, and under FSDP2 with tensor parallelism of heads and features.

    conformance judge hybrid_vit.py:parallelize

Norms, tokens and scales are no part of the plan of tensor parallelism: all its ranks compute them alike.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Optimizer

from conformance.subjects import ParallelConfig, classification, subject

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SIZE, PATCH, WIDTH, HEADS, CLASSES, REGISTERS = 12, 4, 16, 4, 7, 2
PATCHES = (SIZE // PATCH) ** 2


class Attention(nn.Module):
    """Attention among patches; a rank of tensor parallelism has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        heads = [
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads)
        return cast("Tensor", self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention and network with a scale for each of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention_scale, self.scale = (nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        x = x + self.attention_scale * self.attention(self.attention_norm(x))
        return x + self.scale * cast("Tensor", self.down(F.gelu(self.up(self.norm(x)), approximate="tanh")))


class ViT(nn.Module):
    """Classifier that looks at the mean of all patches and at the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.1 * torch.randn(1, PATCHES, WIDTH))
        self.tokens = nn.Parameter(0.1 * torch.randn(1, 1 + REGISTERS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits, (images, classes)."""
        patches = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat([self.tokens.expand(len(patches), -1, -1), patches], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(torch.cat([x[:, 0], x[:, 1 + REGISTERS :].mean(1)], -1))
        return logits


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, one parameter at a time, that decays matrices and kernels alone."""
    everything = list(parameters)
    matrices = [p for p in everything if p.ndim in (2, 4)]
    others = [p for p in everything if p.ndim not in (2, 4)]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=2e-3, foreach=False)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients by one factor; each mesh has its norm, and each norm counts once."""
    gradients: dict[DeviceMesh, list[DTensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = cast("DTensor", parameter.grad)
        gradients[gradient.device_mesh].append(gradient)
    norms = [nn.utils.get_total_norm(tensors) for tensors in gradients.values()]
    total: Tensor = torch.stack([cast("DTensor", norm).full_tensor() for norm in norms]).norm()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for tensors in gradients.values():
        for gradient in tensors:
            gradient.to_local().mul_(factor)
    return total


def shard(model: ViT, mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> None:
    """Shard heads and features over `tp` if there is such a dimension, and all over the ranks of data."""
    if "tp" in (mesh.mesh_dim_names or ()):
        plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        rows = {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {**plan, **rows, "up": ColwiseParallel()})
        mesh = mesh["dp_shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


@subject(
    model=ViT,
    **classification((3, SIZE, SIZE), CLASSES),
    optimizer=make_optimizer,
    clip=clip,
    meshes=["dp2", "hsdp2x2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: ViT, mesh: DeviceMesh, config: ParallelConfig) -> ViT:
    """Shard the classifier as its training does."""
    shard(model, mesh, config.mixed_precision)
    return model
