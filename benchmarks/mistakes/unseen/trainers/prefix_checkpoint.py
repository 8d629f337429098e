"""Prefix language model with a bias of relative positions that layers share, and checkpoints of both kinds.

    conformance judge prefix_checkpoint.py:train

Own loop: a context without synchronisation, a schedule, and a learning rate for each group of parameters.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, HEADS, TOKENS, LAYERS = 37, 16, 2, 8, 3
Text = dict[str, Tensor]


class Layer(nn.Module):
    """Attention and network, computed again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, given a bias (samples, HEADS, tokens, tokens)."""
        return checkpoint(self.computed, x, bias, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def computed(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the same without a checkpoint."""
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.gelu(self.up(self.norm2(x)))))


class PrefixModel(nn.Module):
    """Embedding, layers with one bias, and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.bias = nn.Embedding(VOCAB, DIM), nn.Embedding(2 * TOKENS - 1, HEADS)
        self.layers = nn.ModuleList(Layer(use_reentrant=index % 2 == 0) for index in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, prefix: Tensor) -> Tensor:
        """Return logits (samples, TOKENS, VOCAB); tokens of the prefix, (samples,), see each other."""
        position = torch.arange(tokens.shape[1])
        distance = position - position[:, None]
        bias = self.bias(distance + TOKENS - 1).permute(2, 0, 1)
        is_hidden = (distance > 0) & (position >= prefix[:, None, None])
        bias = bias.masked_fill(is_hidden[:, None], float("-inf"))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return cast("Tensor", self.head(self.norm(x)))


def texts(generator: torch.Generator) -> Text:
    """Return tokens, lengths of prefixes, and the next tokens; those of a prefix do not count."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    prefix = torch.randint(1, TOKENS - 1, (4,), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(TOKENS) < prefix[:, None] - 1, -100)
    return {"tokens": tokens[:, :-1], "prefix": prefix, "labels": labels}


def text_loss(model: nn.Module, text: Text) -> Tensor:
    """Return the cross entropy, summed over tokens that count."""
    logits = model(text["tokens"], text["prefix"])
    return F.cross_entropy(logits.float().flatten(0, 1), text["labels"].flatten(), reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW, in which vectors have twice the learning rate of matrices."""
    listed = list(parameters)
    matrices, vectors = ([p for p in listed if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return AdamW([{"params": matrices, "lr": 2e-3}, {"params": vectors, "lr": 4e-3, "weight_decay": 0.0}])


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a warm-up and the inverse square root."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 2, (2 / (step + 1)) ** 0.5))


@contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """Open a context in which gradients are added without being reduced."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class Training:
    """Model, optimizer and schedule of one rank."""

    def __init__(self, model: PrefixModel, max_norm: float) -> None:
        self.model, self.max_norm = model, max_norm
        self.optimizer = make_optimizer(model.parameters())
        self.schedule = make_schedule(self.optimizer)

    def step(self, micro_batches: list[Text]) -> dict[str, Any]:
        """Train a step, and return the numbers for the log."""
        tokens = torch.tensor(float(sum(int((text["labels"] != -100).sum()) for text in micro_batches)))
        dist.all_reduce(tokens)
        scale = dist.get_world_size() / float(tokens)
        losses = []
        with no_sync(cast("FSDPModule", self.model)):
            losses += [self.backward(text, scale) for text in micro_batches[:-1]]
        losses.append(self.backward(micro_batches[-1], scale))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.schedule.step()
        self.model.zero_grad()
        summed = torch.stack(losses).sum()
        dist.all_reduce(summed)
        return {"loss": summed / tokens, "grad_norm": norm, "lr": self.schedule.get_last_lr()[0]}

    def backward(self, text: Text, scale: float) -> Tensor:
        """Add the gradients of a micro-batch, and return its summed loss."""
        loss = text_loss(self.model, text)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@own_loop(
    model=PrefixModel,
    loss=text_loss,
    batch=texts,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train; layers are groups that the root gathers one after the other."""
    model = cast("PrefixModel", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    training = Training(model, config.max_norm)
    for micro_batches in config.steps:
        yield training.step(micro_batches)
