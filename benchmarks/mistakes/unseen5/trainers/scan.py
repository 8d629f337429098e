"""Language model of selective state spaces (Mamba): no attention, and a recurrence that is computed in fp32.

    conformance judge scan.py:parallelize

In mixed precision norms and the recurrence keep fp32: they are groups of their own without a policy, and cast inputs.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import ParallelConfig, language_model, subject

VOCABULARY, WIDTH, STATES, KERNEL = 32, 16, 4, 3
INNER = 2 * WIDTH


class Norm(nn.Module):
    """Root mean square norm in fp32 of features in any dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the dtype that they came in."""
        wide = x.to(self.weight.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Recurrence(nn.Module):
    """State of each feature that decays, and takes from the input as much as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(INNER, 1))
        self.skip = nn.Parameter(torch.ones(INNER))
        self.rate_bias = nn.Parameter(torch.linspace(-4, -1, INNER))

    def forward(self, x: Tensor, rate: Tensor, inward: Tensor, outward: Tensor) -> Tensor:
        """Return outputs, (texts, tokens, features), of the dtype of `x`."""
        dtype, wide = x.dtype, self.log_decay.dtype
        x, rate, inward, outward = (each.to(wide) for each in (x, rate, inward, outward))
        rate = F.softplus(rate + self.rate_bias)
        decay = (-rate[..., None] * self.log_decay.exp()).exp()
        taken = (rate * x)[..., None] * inward[:, :, None]
        state, outputs = torch.zeros_like(taken[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + taken[:, step]
            outputs.append((state * outward[:, step, None]).sum(-1))
        return (torch.stack(outputs, 1) + self.skip * x).to(dtype)


class Block(nn.Module):
    """Causal convolution, recurrence and gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.convolution = nn.Conv1d(INNER, INNER, KERNEL, padding=KERNEL - 1, groups=INNER)
        self.select, self.rate = nn.Linear(INNER, 2 + 2 * STATES, bias=False), nn.Linear(2, INNER, bias=False)
        self.recurrence = Recurrence()

    def forward(self, residual: Tensor) -> Tensor:
        """Return features of the same shape."""
        x, gate = self.inner(self.norm(residual)).chunk(2, -1)
        x = F.silu(self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rate, inward, outward = self.select(x).split([2, STATES, STATES], -1)
        x = self.recurrence(x, self.rate(rate), inward, outward)
        return residual + cast("Tensor", self.out(x * F.silu(gate)))


class Model(nn.Module):
    """Embedding, blocks and head, which may be the embedding."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (texts, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW with a strong decay."""
    return AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def shard(model: Model, mesh: DeviceMesh, mixed: MixedPrecisionPolicy) -> None:
    """Shard modules that keep fp32, then the blocks and the rest."""
    for module in model.modules():
        if isinstance(module, Norm | Recurrence):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


@subject(
    model=Model,
    **language_model(VOCABULARY),
    tied_model=lambda: Model(is_tied=True),
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Model, mesh: DeviceMesh, config: ParallelConfig) -> Model:
    """Shard the model as its training does."""
    shard(model, mesh, config.mixed_precision)
    return model
