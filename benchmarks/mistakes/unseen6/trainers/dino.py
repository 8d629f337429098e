"""Self-distillation of images (DINO): a student learns from a frozen teacher, which sees the large crops alone.

conformance judge dino.py:parallelize
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import ParallelConfig, subject

PATCHES, PIXELS, WIDTH, HEADS, PROTOTYPES = 9, 12, 16, 2, 10
LARGE, SMALL = 2, 3
Crops = dict[str, Tensor]


def crops(generator: torch.Generator, images: int = 3) -> Crops:
    """Return large and small crops of images, as patches; small crops have fewer patches."""
    large = torch.randn(images, LARGE, PATCHES, PIXELS, generator=generator)
    return {"large": large, "small": torch.randn(images, SMALL, 4, PIXELS, generator=generator)}


class Block(nn.Module):
    """Attention and a network, with a norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Encoder(nn.Module):
    """Vision transformer with a token of the class and a head of prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH) / 50)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))
        self.prototypes = nn.Linear(8, PROTOTYPES, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Return logits of prototypes, (crops, prototypes)."""
        x = torch.cat([self.cls.expand(len(patches), -1, -1), self.embed(patches)], 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.prototypes(F.normalize(self.head(x[:, 0]), dim=-1))
        return logits


class Distillation(nn.Module):
    """Student and teacher; the output is the loss of each image."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Encoder(), Encoder()
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.linspace(-0.1, 0.1, PROTOTYPES))

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        """Return losses, one for each image."""
        images = len(large)
        with torch.no_grad():
            told = self.teacher(large.flatten(0, 1)).unflatten(0, (images, LARGE))
            targets = ((told - self.center) / 0.2).softmax(-1)
        seen = [
            part.unflatten(0, (images, -1)) for part in map(self.student, (large.flatten(0, 1), small.flatten(0, 1)))
        ]
        guesses = (torch.cat(seen, 1).to(targets.dtype) / 0.4).log_softmax(-1)
        every = -torch.einsum("itp,isp->its", targets, guesses)
        same = torch.eye(LARGE, LARGE + SMALL, dtype=torch.bool, device=every.device)
        return every.masked_fill(same, 0.0).sum((1, 2)) / (LARGE * (LARGE + SMALL - 1))


def image_loss(model: nn.Module, batch: Crops) -> Tensor:
    """Return the loss, summed over images."""
    losses: Tensor = model(batch["large"], batch["small"])
    return losses.sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW without decay for vectors."""
    trained = list(parameters)
    matrices, vectors = ([p for p in trained if (p.ndim > 1) is wide] for wide in (True, False))
    return AdamW([{"params": matrices, "weight_decay": 0.04}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)


@subject(
    model=Distillation,
    loss=image_loss,
    batch=crops,
    count=lambda batch: float(len(batch["large"])),
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Distillation, mesh: DeviceMesh, config: ParallelConfig) -> Distillation:
    """Shard the blocks of both, then each encoder, then the rest."""
    policy = config.mixed_precision
    for encoder in (model.student, model.teacher):
        for block in encoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(encoder, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
