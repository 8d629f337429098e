"""U-Net for segmentation: pixels without a label do not count, classes have weights, encoder stages are checkpointed.

conformance judge unet_segmentation.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from conformance.subjects import subject

SIZE, CLASSES, IGNORED, WIDTHS = 8, 5, 255, (8, 16)


class Stage(nn.Module):
    """Two convolutions with norms of groups of channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (images, width, height, width)."""
        return checkpoint(self.computed, x, use_reentrant=False)  # type: ignore[no-any-return]

    def computed(self, x: Tensor) -> Tensor:
        """Return the same without a checkpoint."""
        return F.silu(self.norm2(self.second(F.silu(self.norm1(self.first(x))))))


class UNet(nn.Module):
    """Two stages down, one in the middle, two stages up with the features of the way down."""

    class_weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        first, second = WIDTHS
        self.down = nn.ModuleList([Stage(3, first), Stage(first, second)])
        self.middle = Stage(second, second)
        self.up = nn.ModuleList([Stage(2 * second, first), Stage(2 * first, first)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(second, second, 2, 2), nn.ConvTranspose2d(first, first, 2, 2)])
        self.classes = nn.Conv2d(first, CLASSES, 1)
        self.register_buffer("class_weights", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (images, CLASSES, SIZE, SIZE)."""
        x, skipped = images, []
        for stage in self.down:
            x = stage(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for stage, grow in zip(self.up, self.grow, strict=True):
            x = stage(torch.cat([grow(x), skipped.pop()], 1))
        return cast("Tensor", self.classes(x))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return images and the class of each pixel; those of a border of unequal width have none."""
    classes = torch.randint(CLASSES, (3, SIZE, SIZE), generator=generator)
    borders = torch.randint(0, 3, (3, 1, 1), generator=generator)
    position = torch.arange(SIZE)
    is_border = (position < borders) | (position[:, None] >= SIZE - borders)
    images = torch.randn(3, 3, SIZE, SIZE, generator=generator)
    return {"images": images, "classes": classes.masked_fill(is_border, IGNORED)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the weighted cross entropy, summed over pixels that have a class."""
    logits = model(data["images"]).float()
    weights = cast("UNet", model).class_weights.type_as(logits)
    return F.cross_entropy(logits, data["classes"], weight=weights, ignore_index=IGNORED, reduction="sum")


@subject(
    model=UNet,
    loss=loss,
    batch=batch,
    count=lambda data: int((data["classes"] != IGNORED).sum()),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-3),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: UNet, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard each stage, and each way as a group of the others."""
    options = {"mesh": mesh, "mp_policy": config.mixed_precision}
    for stage in (*model.down, model.middle, *model.up):
        fully_shard(stage, **options)
    fully_shard([*model.grow], **options)
    fully_shard(model, **options)
    return model
