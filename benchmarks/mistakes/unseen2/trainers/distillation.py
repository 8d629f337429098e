"""A small MLP-Mixer learns from a frozen larger one, which is sharded as well.

    conformance judge distillation.py:train

Own loop over a loader: micro-batches have equally many samples, so that means of means are the mean of all.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from conformance.subjects import LoopConfig, own_loop

PATCHES, PIXELS, CLASSES, TEMPERATURE = 6, 10, 8, 2.0
Images = dict[str, Tensor]


class MixerBlock(nn.Module):
    """One network across patches, and one across channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = nn.Sequential(nn.Linear(PATCHES, 2 * PATCHES), nn.GELU(), nn.Linear(2 * PATCHES, PATCHES))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (images, PATCHES, width)."""
        x = x + self.patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return cast("Tensor", x + self.channels(self.norm2(x)))


class Mixer(nn.Module):
    """Patches, blocks and a classifier."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(MixerBlock(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        """Return logits (images, CLASSES)."""
        x = self.stem(patches)
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(self.norm(x).mean(1)))


class Distillation(nn.Module):
    """Student and teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Mixer(8, 2), Mixer(16, 3)
        self.teacher.requires_grad_(False)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of student and teacher, (images, CLASSES) each."""
        with torch.no_grad():
            taught = self.teacher(patches)
        return self.student(patches), taught


def images(generator: torch.Generator) -> Images:
    """Return images and their classes."""
    return {
        "patches": torch.randn(6, PATCHES, PIXELS, generator=generator),
        "labels": torch.randint(CLASSES, (6,), generator=generator),
    }


def image_losses(model: nn.Module, batch: Images) -> Tensor:
    """Return the loss of each image: half by its class, half by the teacher's softened classes."""
    student, teacher = (logits.float() for logits in model(batch["patches"]))
    hard = F.cross_entropy(student, batch["labels"], reduction="none")
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1),
        F.log_softmax(teacher / TEMPERATURE, -1),
        reduction="none",
        log_target=True,
    )
    return 0.5 * hard + 0.5 * TEMPERATURE**2 * soft.sum(-1)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, which decays matrices alone."""
    trained = [p for p in parameters if p.requires_grad]
    return AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=4e-3,
    )


def make_schedule(optimizer: Optimizer) -> LRScheduler:
    """Return a learning rate that falls to a tenth."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=6)


def checkpoint(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> dict[str, Any]:
    """Return all that a checkpoint holds."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "schedule": schedule.state_dict()}


def load(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, directory: Path) -> None:
    """Load a checkpoint."""
    content = checkpoint(model, optimizer, schedule)
    state_dict_loader.load(content, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    schedule.load_state_dict(content["schedule"])


@own_loop(
    model=Distillation,
    loss=lambda model, batch: image_losses(model, batch).sum(),
    batch=images,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    resumes=True,
    accumulation="even",
    refuses=lambda cell: "a mean of means is right for batches of one size alone" if cell.uneven else None,
)
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train the student."""
    model = cast("Distillation", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for block in [*model.student.blocks, *model.teacher.blocks]:
        fully_shard(block, **options)
    fully_shard(model.teacher, **options)
    sharded = fully_shard(model, **options)
    model.student.train()
    model.teacher.eval()
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    if config.load_from:
        load(model, optimizer, schedule, config.load_from)
    logged = 0.0
    for index, batch in enumerate(config.loader):
        is_last = (index + 1) % config.accumulation == 0
        sharded.set_requires_gradient_sync(is_last)
        loss = image_losses(model, batch).mean()
        torch.autograd.backward(loss / config.accumulation)
        logged += loss.item() / config.accumulation
        if is_last:
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            mean = torch.tensor(logged)
            dist.all_reduce(mean)
            yield float(mean) / dist.get_world_size(), norm
            logged = 0.0
    if config.save_to:
        state_dict_saver.save(checkpoint(model, optimizer, schedule), checkpoint_id=config.save_to)
