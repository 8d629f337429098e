"""Vision transformer with registers, activation checkpointing, and weights sharded along their second dimension."""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from conformance.subjects import subject

DIM, HEADS, SIZE, PATCH, REGISTERS, CLASSES = 16, 2, 8, 4, 3, 5


class EncoderBlock(nn.Module):
    """Attention over patches and registers, and a network, each with a learnt scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))
        self.scale1, self.scale2 = nn.Parameter(torch.full((DIM,), 0.5)), nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of `x`, (samples, tokens, DIM)."""
        y = self.norm1(x)
        x = x + self.scale1 * self.attention(y, y, y, need_weights=False)[0]
        return cast("Tensor", x + self.scale2 * self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patches, a class token and registers; the mean of the patches and the class token are classified."""

    def __init__(self) -> None:
        super().__init__()
        patches = (SIZE // PATCH) ** 2
        self.patches = nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, DIM) * 0.1)
        self.registers = nn.Parameter(torch.randn(1, REGISTERS, DIM) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, patches, DIM) * 0.1)
        self.blocks = nn.ModuleList(EncoderBlock() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(2 * DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (samples, CLASSES)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        ends = [token.expand(len(x), -1, -1) for token in (self.class_token, self.registers)]
        x = torch.cat([*ends, x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return cast("Tensor", self.head(torch.cat([x[:, 0], x[:, 1 + REGISTERS :].mean(1)], -1)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return images and distributions over the classes, as of mixup."""
    images = torch.randn(4, 3, SIZE, SIZE, generator=generator)
    return {"images": images, "targets": torch.rand(4, CLASSES, generator=generator).softmax(-1)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy with the distributions."""
    return F.cross_entropy(model(data["images"]), data["targets"], reduction="sum")


def place(parameter: nn.Parameter) -> Shard | None:
    """Return the sharding of a parameter: square matrices are sharded along their columns."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1] else None


@subject(
    model=VisionTransformer,
    loss=loss,
    batch=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: VisionTransformer, mesh: DeviceMesh, config: Any) -> VisionTransformer:
    """Checkpoint and shard each block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
        fully_shard(model.blocks[index], mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model
