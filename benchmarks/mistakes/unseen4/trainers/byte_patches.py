"""Language model of bytes in patches: bytes are read, patches think, and bytes are written, by earlier ones alone.

    conformance judge byte_patches.py:train

Own loop. Learning rates and sizes of initial weights follow the number of inputs (muP); each micro-batch is reduced.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop

BYTES, PATCH, PATCHES, NARROW, WIDE, BASE = 32, 3, 4, 10, 20, 8
Texts = tuple[Tensor, Tensor]


class Reader(nn.Module):
    """Causal convolution of bytes, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * NARROW, 2 * NARROW)
        self.norm = nn.LayerNorm(NARROW)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (texts, bytes, NARROW)."""
        y = self.norm(x)
        value, gate = self.mix(torch.cat([y, F.pad(y, (0, 0, 1, -1)), F.pad(y, (0, 0, 2, -2))], -1)).chunk(2, -1)
        return cast("Tensor", x + value * gate.sigmoid())


class Thinker(nn.Module):
    """Causal attention of patches, with lengths of queries and keys taken out, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE, bias=False)
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE, bias=False), nn.Linear(2 * WIDE, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (texts, patches, WIDE)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=4.0)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.gelu(self.up(self.norm(x)))))


class ByteModel(nn.Module):
    """Reader, thinkers and writer; a patch is known to the bytes of later patches alone."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, NARROW), nn.Linear(NARROW, BYTES, bias=False)
        self.reader, self.writer = Reader(), Reader()
        self.join, self.split = nn.Linear(PATCH * NARROW, WIDE), nn.Linear(WIDE, PATCH * NARROW)
        self.first = nn.Parameter(torch.empty(1, 1, WIDE))
        self.thinkers = nn.ModuleList(Thinker() for _ in range(2))
        self.initialise()
        if tied:
            self.head.weight = self.embedding.weight

    def initialise(self) -> None:
        """Give initial values, by the number of inputs."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.first, std=0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (texts, bytes, BYTES) of the bytes after each."""
        x = self.reader(self.embedding(text))
        patches = self.join(x.unflatten(1, (-1, PATCH)).flatten(2))
        patches = torch.cat([self.first.expand(len(text), -1, -1), patches[:, :-1]], 1)
        for thinker in self.thinkers:
            patches = thinker(patches)
        x = x + self.split(patches).unflatten(2, (PATCH, -1)).flatten(1, 2)
        return cast("Tensor", self.head(self.writer(x)) * (BASE / NARROW))


def texts(generator: torch.Generator) -> Texts:
    """Return bytes and the next ones, of which those behind the end do not count."""
    text = torch.randint(BYTES, (4, PATCH * PATCHES + 1), generator=generator)
    ends = torch.randint(2, PATCH * PATCHES + 1, (4, 1), generator=generator)
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(PATCH * PATCHES) >= ends, -1)


def known(batch: Texts) -> int:
    """Return the number of bytes that count."""
    return int((batch[1] >= 0).sum())


def byte_loss(model: nn.Module, batch: Texts) -> Tensor:
    """Return the cross entropy, summed over bytes."""
    logits = model(batch[0]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-1, reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, with the learning rate of a matrix by the number of its inputs."""
    groups = [
        {"params": [p], "lr": 4e-3 * (BASE / p.shape[1] if p.ndim == 2 else 1.0), "weight_decay": 0.1 * (p.ndim == 2)}
        for p in parameters
    ]
    return AdamW(groups, betas=(0.9, 0.95))


@own_loop(
    model=ByteModel,
    loss=byte_loss,
    batch=texts,
    count=known,
    optimizer=make_optimizer,
    tied_model=lambda: ByteModel(tied=True),
    meta=True,
    offload=True,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train with the mean over all bytes of a step."""
    model = cast("ByteModel", config.model())
    options: dict[str, Any] = {
        "mesh": config.device_mesh(),
        "mp_policy": config.mixed_precision,
        "offload_policy": config.offload_policy,
    }
    for module in (*model.thinkers, model.reader, model.writer):
        fully_shard(module, **options)
    fully_shard(model, **options)
    if config.on_meta:
        model.to_empty(device="cpu" if config.offload else config.device)
        model.initialise()
    optimizer = make_optimizer(model.parameters())
    for micro_batches in config.steps:
        optimizer.zero_grad()
        totals = torch.zeros(2, dtype=torch.float64)
        totals[0] = sum(known(batch) for batch in micro_batches)
        dist.all_reduce(totals[:1])
        for batch in micro_batches:
            loss = byte_loss(model, batch)
            torch.autograd.backward(loss * (dist.get_world_size() / float(totals[0])))
            totals[1] += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        dist.all_reduce(totals[1:])
        yield float(totals[1] / totals[0]), norm
