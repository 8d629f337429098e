"""ConvNeXt with layer scale; after each step an average of the weights is evaluated in the model itself.

    conformance judge convnext_ema.py:train

Own loop with a schedule, which is saved and loaded with model and optimizer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from conformance.subjects import LoopConfig, own_loop

SIZE, CLASSES, WIDTHS = 12, 7, (8, 16)
Images = dict[str, Tensor]


class ChannelsNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (images, channels, height, width)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Convolution of each channel, a network on channels, and a learnt scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (images, width, height, width)."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.layer_scale * self.down(F.gelu(self.up(y)))
        return cast("Tensor", x + y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """Stem, stages with a reduction between them, and head."""

    def __init__(self) -> None:
        super().__init__()
        first, second = WIDTHS
        self.stem = nn.Sequential(nn.Conv2d(3, first, 2, stride=2), ChannelsNorm(first))
        self.blocks = nn.ModuleList(
            [
                ConvNeXtBlock(first),
                nn.Sequential(ChannelsNorm(first), nn.Conv2d(first, second, 2, stride=2)),
                ConvNeXtBlock(second),
            ]
        )
        self.head = nn.Sequential(nn.LayerNorm(second), nn.Linear(second, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (images, CLASSES)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(x.mean((2, 3))))


class Average:
    """Exponential moving average of this rank's shards."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, decay: float = 0.9) -> None:
        """Add the present weights."""
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter, 1 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Open a context in which the model has the average as its weights."""
        kept = [parameter.detach().clone() for parameter in self.parameters]
        self.copy(self.average)
        yield
        self.copy(kept)

    @torch.no_grad()
    def copy(self, values: list[Tensor]) -> None:
        """Give values to the model's parameters."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def images(generator: torch.Generator) -> Images:
    """Return images and soft labels, as CutMix makes them."""
    first, second = torch.randint(CLASSES, (2, 6), generator=generator)
    share = torch.rand(6, 1, generator=generator)
    soft = share * F.one_hot(first, CLASSES) + (1 - share) * F.one_hot(second, CLASSES)
    return {"images": torch.randn(6, 3, SIZE, SIZE, generator=generator), "soft": soft}


def soft_loss(model: nn.Module, batch: Images) -> Tensor:
    """Return the cross entropy with soft labels, summed over images."""
    return F.cross_entropy(model(batch["images"]).float(), batch["soft"].float(), reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW."""
    return AdamW(parameters, lr=4e-3, weight_decay=0.05)


def make_schedule(optimizer: Optimizer) -> CosineAnnealingLR:
    """Return a cosine over ten steps."""
    return CosineAnnealingLR(optimizer, T_max=10)


@torch.no_grad()
def evaluate(model: nn.Module, average: Average, batch: Images) -> None:
    """Compute the loss with the average as weights."""
    with average.in_model():
        soft_loss(model, batch)
        cast("FSDPModule", model).reshard()


def load(model: nn.Module, optimizer: Optimizer, schedule: CosineAnnealingLR, directory: Path) -> None:
    """Load the checkpoint of `train`."""
    weights, state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
    state_dict_loader.load(content, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    schedule.load_state_dict(content["schedule"])


@own_loop(
    model=ConvNeXt,
    loss=soft_loss,
    batch=images,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    resumes=True,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train, average and evaluate."""
    model = cast("ConvNeXt", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for block in model.blocks:
        fully_shard(block, **options)
    sharded = fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    if config.load_from:
        load(model, optimizer, schedule, config.load_from)
    average = Average(model)
    for micro_batches in config.steps:
        samples, summed = torch.tensor(float(sum(len(batch["images"]) for batch in micro_batches))), torch.zeros(())
        dist.all_reduce(samples)
        for index, batch in enumerate(micro_batches):
            sharded.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = soft_loss(model, batch)
            (loss / samples * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            summed += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update()
        evaluate(model, average, micro_batches[0])
        dist.all_reduce(summed)
        yield {"loss": summed / samples, "grad_norm": norm}
    if config.save_to:
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}
        state_dict_saver.save(content, checkpoint_id=config.save_to)
