"""Segmentation of images by a U-Net whose pixels have weights by class, and where unlabelled pixels do not count.

conformance judge segmentation.py:parallelize
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects import ParallelConfig, subject

SIZE, CHANNELS, CLASSES, VOID = 16, 3, 5, 255
WIDTHS = (8, 12, 16)
Scenes = tuple[Tensor, Tensor]


def scenes(generator: torch.Generator, count: int = 2) -> Scenes:
    """Return images and the class of each pixel, in which borders of each image are void."""
    pixels = torch.randn(count, CHANNELS, SIZE, SIZE, generator=generator)
    classes = torch.randint(CLASSES, (count, SIZE, SIZE), generator=generator)
    border = torch.randint(0, 5, (count, 1, 1), generator=generator)
    return pixels, classes.masked_fill(torch.arange(SIZE) < border, VOID)


class Stage(nn.Module):
    """Two convolutions, each with a norm of groups of channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.first_norm, self.second_norm = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the same size."""
        x = F.leaky_relu(self.first_norm(self.first(x)), 0.1)
        return F.leaky_relu(self.second_norm(self.second(x)), 0.1)


class UNet(nn.Module):
    """Network whose way up sees the maps of its way down."""

    class_weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weights", torch.empty(CLASSES), persistent=False)
        self.down = nn.ModuleList(map(Stage, (CHANNELS, *WIDTHS), WIDTHS))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, stride=2) for high, low in pairwise(WIDTHS))
        self.up = nn.ModuleList(Stage(2 * width, width) for width in WIDTHS[:-1])
        self.head = nn.Conv2d(WIDTHS[0], CLASSES, 1)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the weights of the classes: rare ones have more."""
        with torch.no_grad():
            self.class_weights.copy_(torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits, (images, classes, height, width)."""
        x = pixels
        seen: list[Tensor] = []
        for stage in self.down:
            x = stage(F.max_pool2d(x, 2) if seen else x)
            seen.append(x)
        for index in reversed(range(len(self.up))):
            x = self.up[index](torch.cat([seen[index], self.grow[index](x)], 1))
        logits: Tensor = self.head(x)
        return logits


def pixel_loss(model: nn.Module, batch: Scenes) -> Tensor:
    """Return the weighted cross entropy of all pixels that have a class, summed."""
    pixels, classes = batch
    logits = model(pixels).float()
    weights = cast("UNet", model).class_weights.float()
    return F.cross_entropy(logits, classes, weights, ignore_index=VOID, reduction="sum")


def count_pixels(batch: Scenes) -> float:
    """Return the number of pixels that have a class."""
    return float((batch[1] != VOID).sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum and decay."""
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def initialize(model: nn.Module) -> None:
    """Initialise all layers and the buffer after the model was made on the meta device."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.GroupNorm):
            module.reset_parameters()
    cast("UNet", model).reset_buffers()


def shard(model: UNet, mesh: DeviceMesh, mixed: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """Shard each stage, then the rest."""
    for stage in (*model.down, *model.up):
        fully_shard(stage, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)


@subject(
    model=UNet,
    loss=pixel_loss,
    batch=scenes,
    count=count_pixels,
    optimizer=make_optimizer,
    initialize=initialize,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
)
def parallelize(model: UNet, mesh: DeviceMesh, config: ParallelConfig) -> UNet:
    """Shard the network as its training does."""
    offload = CPUOffloadPolicy(pin_memory=config.pin_memory) if config.offload else OffloadPolicy()
    shard(model, mesh, config.mixed_precision, offload)
    return model
