"""Joint embedding (I-JEPA): a predictor tells the features that a frozen target encoder gives hidden patches.

    conformance judge joint_embedding.py:train

Own loop, with a learning rate that falls from layer to layer, and its own loader of data.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from conformance.subjects import LoopConfig, own_loop

PATCHES, PIXELS, DIM, NARROW, HIDDEN = 9, 8, 16, 10, 3
Images = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and network in parallel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 5 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (images, patches, width)."""
        width = x.shape[-1]
        q, k, v, up = self.inputs(self.norm(x)).split([width, width, width, 2 * width], -1)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return cast("Tensor", x + self.outputs(torch.cat([attended, F.gelu(up)], -1)))


class Encoder(nn.Module):
    """Patches that are given, with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions = nn.Linear(PIXELS, DIM), nn.Embedding(PATCHES, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Return features (images, patches, DIM)."""
        x = self.patch(patches) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.norm(x))


class JointEmbedding(nn.Module):
    """Context encoder, target encoder, and predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.target = Encoder(), Encoder()
        self.target.load_state_dict(self.context.state_dict())
        self.target.requires_grad_(False)
        self.narrow, self.wide = nn.Linear(DIM, NARROW), nn.Linear(NARROW, DIM)
        self.question = nn.Embedding(PATCHES, NARROW)
        self.predictor = Block(NARROW)

    def forward(self, patches: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets (images, HIDDEN, DIM), of the last patches of an order."""
        hidden, seen = order[:, -HIDDEN:], order[:, :-HIDDEN]
        with torch.no_grad():
            everything = torch.arange(PATCHES).expand(len(patches), -1)
            target = self.target(patches, everything).gather(1, hidden[..., None].expand(-1, -1, DIM))
        visible = patches.gather(1, seen[..., None].expand(-1, -1, PIXELS))
        x = torch.cat([self.narrow(self.context(visible, seen)), self.question(hidden)], 1)
        return self.wide(self.predictor(x)[:, -HIDDEN:]), target


def images(generator: torch.Generator) -> Images:
    """Return patches, and an order of them."""
    return torch.randn(5, PATCHES, PIXELS, generator=generator), torch.rand(5, PATCHES, generator=generator).argsort(1)


def embedding_loss(model: nn.Module, batch: Images) -> Tensor:
    """Return the smooth distance from targets, summed over images."""
    predicted, target = model(*batch)
    return F.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean((1, 2)).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, of which each parameter is a group."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [{"params": [p], "lr": 2e-3 * 0.9 ** (index // 4)} for index, p in enumerate(reversed(trained))]
    return AdamW(groups, weight_decay=0.04)


def make_schedule(optimizer: Optimizer) -> OneCycleLR:
    """Return one cycle of learning rates, and of momenta against them."""
    return OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=12)


@own_loop(
    model=JointEmbedding,
    loss=embedding_loss,
    batch=images,
    count=lambda batch: len(batch[0]),
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train context encoder and predictor."""
    model = cast("JointEmbedding", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for encoder in (model.context, model.target):
        for block in encoder.blocks:
            fully_shard(block, **options)
        fully_shard(encoder, **options)
    fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    for micro_batches in config.steps:
        count = torch.tensor(sum(len(patches) for patches, _ in micro_batches))
        dist.all_reduce(count)
        total = torch.zeros(())
        *earlier, last = micro_batches
        for batch in [*earlier, last]:
            cast("FSDPModule", model).set_requires_gradient_sync(batch is last)
            loss = embedding_loss(model, batch)
            torch.autograd.backward(loss.mul(dist.get_world_size()).div(count))
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], config.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        yield {"loss": total / count, "grad_norm": norm}
