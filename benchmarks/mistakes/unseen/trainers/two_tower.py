"""Two towers, for images and texts, that are trained by contrast among the pairs of a group.

    conformance judge two_tower.py:parallelize

A sample is a group of pairs, each of which is told from the others of its group; the temperature is learnt. FSDP sums
gradients, and divides by nothing.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from conformance.subjects import subject

PAIRS, PIXELS, WORDS, WIDTH, TEXT, EMBEDDED = 4, 6, 23, 18, 5, 10


class ImageTower(nn.Module):
    """Convolutions and a mean over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, stride=2)
        self.project = nn.Linear(WIDTH, EMBEDDED, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return unit vectors (images, EMBEDDED) of images (images, 3, PIXELS, PIXELS)."""
        x = F.gelu(self.second(F.gelu(self.first(images))))
        return F.normalize(self.project(x.mean((2, 3))), dim=-1)


class TextTower(nn.Module):
    """Bag of words with learnt weights, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.weights = nn.EmbeddingBag(WORDS, WIDTH, mode="sum"), nn.Embedding(WORDS, 1)
        self.hidden, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EMBEDDED, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return unit vectors (texts, EMBEDDED) of words (texts, TEXT)."""
        weights = self.weights(words).squeeze(-1).softmax(-1)
        x = self.words(words, per_sample_weights=weights)
        return F.normalize(self.project(F.gelu(self.hidden(x))), dim=-1)


class TwoTowers(nn.Module):
    """Similarities between the images and the texts of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = ImageTower(), TextTower()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return similarities (groups, PAIRS, PAIRS), images by texts."""
        image = self.image(images.flatten(0, 1)).unflatten(0, (-1, PAIRS))
        text = self.text(words.flatten(0, 1)).unflatten(0, (-1, PAIRS))
        return cast("Tensor", image @ text.transpose(1, 2) * self.scale.exp())


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the images and texts of groups."""
    images = torch.randn(3, PAIRS, 3, PIXELS, PIXELS, generator=generator)
    return images, torch.randint(WORDS, (3, PAIRS, TEXT), generator=generator)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of each image's text and each text's image, summed over all pairs."""
    similarities = model(*data).float()
    targets = torch.arange(PAIRS).expand(len(similarities), -1)
    by_image = F.cross_entropy(similarities.transpose(1, 2), targets, reduction="sum")
    return (by_image + F.cross_entropy(similarities, targets, reduction="sum")) / 2


@subject(
    model=TwoTowers,
    loss=loss,
    batch=batch,
    count=lambda data: data[1].shape[0] * PAIRS,
    reduction="sum",
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: TwoTowers, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard both towers; the text tower is gathered while the image tower computes."""
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    text = cast("FSDPModule", model.text)
    model.image.register_forward_pre_hook(lambda *_: cast("None", text.unshard(async_op=True) and None))
    return model
