"""Perceiver IO: latents attend to bytes, and one query attends to latents; trained by Lion with smoothed labels.

conformance judge perceiver.py:parallelize
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from conformance.subjects import ParallelConfig, subject

BYTES, WIDTH, DIM, LATENTS, LENGTH, BANDS, CLASSES = 48, 14, 18, 5, 11, 3, 4


class CrossAttention(nn.Module):
    """Queries attend to inputs of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.input_norm = nn.LayerNorm(DIM), nn.LayerNorm(WIDTH + 2 * BANDS)
        options: dict[str, Any] = {"kdim": WIDTH + 2 * BANDS, "vdim": WIDTH + 2 * BANDS, "batch_first": True}
        self.attention = nn.MultiheadAttention(DIM, 2, **options)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, queries: Tensor, inputs: Tensor, is_padding: Tensor) -> Tensor:
        """Return a tensor of the shape of `queries`, (samples, queries, DIM)."""
        normed = self.input_norm(inputs)
        y, _ = self.attention(self.query_norm(queries), normed, normed, key_padding_mask=is_padding, need_weights=False)
        x = queries + y
        return cast("Tensor", x + self.mlp(x))


class SelfAttention(nn.Module):
    """Latents attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, LATENTS, DIM)."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return cast("Tensor", x + self.mlp(x))


class Perceiver(nn.Module):
    """Latents read the bytes twice by the same weights."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH, padding_idx=0)
        self.latents = nn.Parameter(torch.randn(LATENTS, DIM) * 0.2)
        self.query = nn.Parameter(torch.randn(1, DIM) * 0.2)
        self.register_buffer("frequencies", torch.logspace(0, 2, BANDS, base=2.0, dtype=torch.float64) * torch.pi)
        self.read = CrossAttention()
        self.process = nn.ModuleList(SelfAttention() for _ in range(2))
        self.answer = nn.MultiheadAttention(DIM, 1, batch_first=True)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (samples, CLASSES)."""
        x = self.embedding(text)
        phases = torch.linspace(-1, 1, text.shape[1], dtype=torch.float64)[:, None] * self.frequencies
        waves = torch.cat([phases.sin(), phases.cos()], -1).to(x.dtype).expand(len(text), -1, -1)
        inputs, is_padding = torch.cat([x, waves], -1), text == 0
        latents = self.latents.expand(len(text), -1, -1)
        for _ in range(2):
            latents = self.read(latents, inputs, is_padding)
            for layer in self.process:
                latents = layer(latents)
        answer, _ = self.answer(self.query.expand(len(text), -1, -1), latents, latents, need_weights=False)
        return cast("Tensor", self.head(answer[:, 0]))


def texts(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return bytes with padding at the end, and classes."""
    text = torch.randint(1, BYTES, (6, LENGTH), generator=generator)
    ends = torch.randint(3, LENGTH + 1, (6, 1), generator=generator)
    return text * (torch.arange(LENGTH) < ends), torch.randint(CLASSES, (6,), generator=generator)


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy with smoothed labels, summed over texts."""
    return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1, reduction="sum")


class Lion(Optimizer):
    """Steps of equal size by the sign of a moving average."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 3e-4, decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            slow, fast = group["betas"][1], group["betas"][0]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(average.lerp(p.grad, 1 - fast).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - slow)


@subject(
    model=Perceiver,
    loss=smoothed,
    batch=texts,
    optimizer=Lion,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Perceiver, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard layers; parameters of the root and the embedding are the root's group."""
    for module in [model.read, *model.process, model.answer]:
        fully_shard(module, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)
    return model
