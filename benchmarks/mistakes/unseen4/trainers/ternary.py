"""Language model whose matrices are rounded to -1, 0 and 1 times their mean size (BitNet), with squared ReLU.

conformance judge ternary.py:parallelize
"""

from collections.abc import Iterable
from typing import cast

import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects import ParallelConfig, language_model, subject

VOCAB, DIM, HIDDEN, LAYERS = 40, 16, 32, 2


class TernaryLinear(nn.Linear):
    """Layer that computes with rounded weights, and passes gradients straight to those that are trained."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (..., out_features)."""
        scale = self.weight.detach().float().abs().mean().clamp(min=1e-5)
        rounded = ((self.weight.detach() / scale).round().clamp(-1, 1) * scale).to(self.weight.dtype)
        return F.linear(F.rms_norm(x, (self.in_features,)), self.weight + (rounded - self.weight).detach(), self.bias)


class Block(nn.Module):
    """Causal attention and network, of rounded matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.qkv, self.out = TernaryLinear(DIM, 3 * DIM, bias=False), TernaryLinear(DIM, DIM, bias=False)
        self.up, self.down = TernaryLinear(DIM, HIDDEN, bias=False), TernaryLinear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.relu(self.up(self.norm2(x))).square()))


class Ternary(nn.Module):
    """Embedding and head, which are not rounded, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(self.norm(x)))


def initialize(model: nn.Module) -> None:
    """Give initial values to a model that has none."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.2, a=-0.6, b=0.6)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with Nesterov's momentum, which decays matrices alone."""
    known = list(parameters)
    matrices, others = ([p for p in known if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


@subject(
    model=Ternary,
    optimizer=make_optimizer,
    initialize=initialize,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    **language_model(VOCAB),
)
def parallelize(model: Ternary, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard blocks, embedding and head, each for itself."""
    for module in (model.embedding, *model.blocks, model.head):
        fully_shard(module, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
