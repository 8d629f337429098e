"""Language model of a sliding window, with sinks, in a loop of callbacks; logits are computed in pieces.

    torchrun --nproc-per-node 2 window_lm.py
    conformance judge window_lm.py:train

Each micro-batch reduces to shards, and the sum over replicas waits for the last one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from conformance.subjects import LoopConfig, own_loop

VOCABULARY, WIDTH, HEADS, LENGTH, WINDOW, PIECE = 32, 16, 2, 12, 4, 5
IGNORED = -100
Tokens = dict[str, Tensor]


def tokens(generator: torch.Generator, count: int = 3) -> Tokens:
    """Return documents, whose prompts and some other tokens do not count."""
    ids = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
    prompts = torch.randint(1, 6, (count, 1), generator=generator)
    skipped = (torch.arange(LENGTH) < prompts) | (torch.rand(count, LENGTH, generator=generator) < 0.1)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(skipped, IGNORED)}


class Window(nn.Module):
    """Attention to the last tokens, with a logit of a sink for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        places = torch.arange(x.shape[1], device=x.device)
        behind = places[:, None] - places
        logits = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).masked_fill(
            (behind < 0) | (behind >= WINDOW), float("-inf")
        )
        sinks = self.sinks.to(logits.dtype)[None, :, None, None].expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        attended: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return attended


class Layer(nn.Module):
    """Attention and a network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Window(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        x = x + self.attention(self.norm1(x))
        changed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return changed


class WindowLM(nn.Module):
    """Language model that returns its summed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def piece(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of some tokens, summed."""
        return F.cross_entropy(self.head(x).float(), labels, ignore_index=IGNORED, reduction="sum")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of all tokens that count; logits of a piece are computed again in backward."""
        x = self.embed(ids) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        pieces = zip(
            *(torch.split(each, PIECE) for each in (self.norm(x).flatten(0, 1), labels.flatten())), strict=True
        )
        losses: list[Any] = [checkpoint(self.piece, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum()


def token_loss(model: nn.Module, batch: Tokens) -> Tensor:
    """Return the summed loss."""
    loss: Tensor = model(batch["ids"], batch["labels"])
    return loss


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW as language models have it."""
    return AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


@dataclass
class Loop:
    """Loop whose events call functions."""

    model: Any
    optimizer: Optimizer
    max_norm: float
    before_backward: list[Callable[["Loop", bool], None]] = field(default_factory=list)
    after_step: list[Callable[["Loop"], None]] = field(default_factory=list)

    def step(self, batches: list[Tokens]) -> dict[str, Tensor]:
        """Take a step."""
        counted = torch.tensor([0, sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)]).double()
        everywhere = counted[1].clone()
        dist.all_reduce(everywhere)
        for index, batch in enumerate(batches):
            for call in self.before_backward:
                call(self, index == len(batches) - 1)
            loss = token_loss(self.model, batch)
            torch.autograd.backward(loss * float(dist.get_world_size() / everywhere))
            counted[0] += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        for done in self.after_step:
            done(self)
        dist.all_reduce(counted)
        return {"loss": counted[0] / counted[1], "grad_norm": norm}


def reduce_late(loop: Loop, is_last: bool) -> None:
    """Let the sum over replicas wait for the last micro-batch."""
    loop.model.set_requires_all_reduce(is_last)


def forget(loop: Loop) -> None:
    """Forget all gradients."""
    loop.optimizer.zero_grad()


def make_loop(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, max_norm: float) -> Loop:
    """Return the loop of a model, which is sharded."""
    assert isinstance(model, WindowLM)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    whole: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy)
    return Loop(whole, make_optimizer(model.parameters()), max_norm, [reduce_late], [forget])


@own_loop(
    model=WindowLM,
    loss=token_loss,
    batch=tokens,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Tensor]]:
    """Train as the script does."""
    loop = make_loop(config.model(), config.device_mesh(), config.mixed_precision, config.max_norm)
    yield from map(loop.step, config.steps)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    script = make_loop(WindowLM(), init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(), 1.0)
    for _ in range(8):
        print(float(script.step([tokens(source) for _ in range(2)])["loss"]))
    dist.destroy_process_group()
