"""Detection of objects as a set (DETR): queries are matched with objects, and all else is no object.

    conformance judge detection.py:train

Own loop, whose losses are divided by the objects of all ranks; the convolutions have a smaller learning rate.
"""

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop

CLASSES, QUERIES, OBJECTS, DIM, SIZE = 4, 5, 3, 12, 8
MATCHES = torch.tensor(list(permutations(range(QUERIES), OBJECTS)))
Images = dict[str, Tensor]


class Backbone(nn.Module):
    """Convolutions with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, DIM, 3, 1, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, image: Tensor) -> Tensor:
        """Return features (images, places, DIM)."""
        x = self.second(F.relu(self.norm(self.first(image))))
        return F.relu(x).flatten(2).transpose(1, 2)


class DecoderLayer(nn.Module):
    """Attention of queries to each other and to places, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = (nn.MultiheadAttention(DIM, 2, batch_first=True) for _ in range(2))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(DIM) for _ in range(3))
        self.network = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM))

    def forward(self, x: Tensor, places: Tensor, question: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (images, QUERIES, DIM)."""
        asked = x + question
        x = self.norm1(x + self.own(asked, asked, x, need_weights=False)[0])
        x = self.norm2(x + self.other(x + question, places, places, need_weights=False)[0])
        return cast("Tensor", self.norm3(x + self.network(x)))


class Detector(nn.Module):
    """Backbone, decoder, classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.places = nn.Parameter(torch.randn((SIZE // 2) ** 2, DIM) * 0.3)
        self.questions = nn.Embedding(QUERIES, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.classes, self.box = nn.Linear(DIM, CLASSES + 1), nn.Linear(DIM, 4)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (images, QUERIES, CLASSES + 1), and boxes (images, QUERIES, 4)."""
        places = self.backbone(image) + self.places
        question = self.questions.weight.expand(len(image), -1, -1)
        x = question
        for layer in self.layers:
            x = layer(x, places, question)
        return self.classes(x), self.box(x).sigmoid()


def images(generator: torch.Generator) -> Images:
    """Return images with up to OBJECTS objects, of which at least one image has some."""
    counts = torch.randint(OBJECTS + 1, (4, 1), generator=generator)
    counts[0] = counts[0].clamp(min=1)
    return {
        "image": torch.randn(4, 3, SIZE, SIZE, generator=generator),
        "class": torch.randint(CLASSES, (4, OBJECTS), generator=generator),
        "box": torch.rand(4, OBJECTS, 4, generator=generator),
        "is_object": torch.arange(OBJECTS) < counts,
    }


def objects(batch: Images) -> int:
    """Return the number of objects."""
    return int(batch["is_object"].sum())


def set_loss(model: nn.Module, batch: Images) -> Tensor:
    """Return the losses of classes and boxes, with the cheapest match of each image, summed."""
    logits, box = model(batch["image"])
    is_object = batch["is_object"]
    classes = batch["class"].masked_fill(~is_object, CLASSES)
    distance = (box[:, :, None] - batch["box"][:, None]).abs().sum(-1)
    with torch.no_grad():
        chance = logits.softmax(-1).gather(2, classes[:, None].expand(-1, QUERIES, -1))
        cost = (2 * distance - chance) * is_object[:, None]
        best = MATCHES[cost[:, MATCHES, torch.arange(OBJECTS)].sum(-1).argmin(1)]
    boxes = (distance.gather(1, best[:, None]).squeeze(1) * is_object).sum()
    target = torch.full((len(best), QUERIES), CLASSES).scatter(1, best, classes)
    weight = torch.ones(CLASSES + 1)
    weight[CLASSES] = 0.1
    return cast("Tensor", F.cross_entropy(logits.transpose(1, 2), target, weight=weight, reduction="sum") + 2 * boxes)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, slower for convolutions."""
    known = list(parameters)
    slow, fast = ([p for p in known if (p.ndim == 4) is is_slow] for is_slow in (True, False))
    return AdamW([{"params": slow, "lr": 2e-4}, {"params": fast, "lr": 2e-3}], weight_decay=1e-4)


@own_loop(model=Detector, loss=set_loss, batch=images, count=objects, optimizer=make_optimizer, meshes=["dp2"])
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with the losses of all objects of a step."""
    model = cast("Detector", config.model())
    mesh = config.device_mesh()
    for module in (model.backbone, *model.layers):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    for micro_batches in config.steps:
        boxes = torch.tensor(float(sum(objects(batch) for batch in micro_batches)))
        dist.all_reduce(boxes)
        boxes_of_a_rank = boxes / dist.get_world_size()
        summed = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index + 1 == len(micro_batches))
            loss = set_loss(model, batch)
            torch.autograd.backward(loss / boxes_of_a_rank)
            summed += loss.detach()
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        clip_grads_with_norm_(model.parameters(), config.max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(summed)
        yield {"loss": summed / boxes, "grad_norm": norm}
