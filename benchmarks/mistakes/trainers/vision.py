"""Convolutional network for images under HSDP, in the style of an image classification recipe.

    conformance judge benchmarks/mistakes/trainers/vision.py:parallelize

The pixels' mean and deviation are buffers that are estimated from a few images; the norm is computed by hand.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from conformance.subjects import subject

CLASSES, WIDTH, SIZE = 10, 16, 8


class Normalize(nn.Module):
    """Subtract the pixels' mean, and divide by their standard deviation."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.register_buffer("std", torch.ones(1, 3, 1, 1))
        self.estimate(torch.rand(64, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3)))

    def estimate(self, images: Tensor) -> None:
        """Set the buffers to the statistics of images, (samples, 3, height, width)."""
        self.mean.copy_(images.mean((0, 2, 3), keepdim=True))
        self.std.copy_(images.std((0, 2, 3), keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return images of the same shape."""
        return (x.to(self.std.dtype) - self.mean) / self.std


class Stage(nn.Module):
    """Residual block: depthwise convolution, group norm, and two pointwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.GroupNorm(4, WIDTH)
        self.expand, self.project = nn.Conv2d(WIDTH, 4 * WIDTH, 1), nn.Conv2d(4 * WIDTH, WIDTH, 1)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of `x`, (samples, WIDTH, height, width)."""
        return cast("Tensor", x + self.drop(self.project(F.gelu(self.expand(self.norm(self.depthwise(x)))))))


class ConvNet(nn.Module):
    """Stem, stages and classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.normalize = Normalize()
        self.stem = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.stages = nn.ModuleList(Stage() for _ in range(3))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (samples, CLASSES) of images (samples, 3, SIZE, SIZE)."""
        x = self.stem(self.normalize(images).to(self.stem.weight.dtype))
        for stage in self.stages:
            x = stage(x)
        return cast("Tensor", self.classifier(x.mean((2, 3))))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return images and their classes."""
    images = torch.rand(6, 3, SIZE, SIZE, generator=generator)
    return {"images": images, "labels": torch.randint(CLASSES, (6,), generator=generator)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy with smoothed labels."""
    return F.cross_entropy(model(data["images"]), data["labels"], reduction="sum", label_smoothing=0.1)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients by their norm, whose square is summed over the ranks that shard them."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    square = torch.stack([shard.square().sum() for shard in shards]).sum()
    sharded = next(grad for grad in gradients if isinstance(grad, DTensor))
    dist.all_reduce(square, group=sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1))
    norm = square.sqrt()
    for shard in shards:
        shard.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@subject(
    model=ConvNet,
    loss=loss,
    batch=batch,
    clip=clip,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: ConvNet, mesh: DeviceMesh, config: Any) -> ConvNet:
    """Shard stage by stage; with bf16, images and statistics stay in fp32 up to the stem."""
    param_dtype = torch.bfloat16 if config.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for stage in model.stages:
        fully_shard(stage, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
