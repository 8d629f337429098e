"""Mixture of experts under tensor parallelism: experts are divided by features, and the router is on all ranks.

conformance judge moe_tp.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim import AdamW

from conformance.subjects import ParallelConfig, subject

VOCAB, DIM, HIDDEN, EXPERTS, CHOSEN, TOKENS = 35, 16, 12, 4, 2, 8


class Replicated(ParallelStyle):
    """Module whose computation is the same on all tensor-parallel ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)

        def leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def entering(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that ranks have copies of, and that gets a part of its gradient on each."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class Experts(nn.Module):
    """Gated networks, whose hidden features tensor-parallel ranks have some of each."""

    mesh: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.25) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.25)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """Return tokens (tokens, DIM), by each token's shares of experts, (tokens, EXPERTS)."""
        if self.mesh is not None:
            x, shares = (entering(x, self.mesh), entering(shares, self.mesh))
        gate, up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate, self.up, self.down))
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            chosen = shares[:, expert].nonzero().squeeze(-1)
            tokens = x[chosen]
            hidden = F.silu(tokens @ gate[expert]) * (tokens @ up[expert])
            y = y.index_add(0, chosen, (hidden @ down[expert]) * shares[chosen, expert, None])
        if self.mesh is not None:
            summed = DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(
                placements=[Replicate()]
            )
            y = summed.to_local()
        return y

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep some of the hidden features of each expert."""
        self.mesh = mesh
        for name, dimension in (("gate", 2), ("up", 2), ("down", 1)):
            weight = distribute_tensor(getattr(self, name).detach(), mesh, [Shard(dimension)])
            setattr(self, name, nn.Parameter(weight))


class Layer(nn.Module):
    """Mixer of tokens by a causal mean, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.mix = nn.Linear(2 * DIM, DIM, bias=False)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens of the shape of `x`, (samples, tokens, DIM), and the router's penalty (samples, tokens)."""
        y = self.norm1(x)
        earlier = y.cumsum(1) / torch.arange(1, y.shape[1] + 1, dtype=y.dtype)[:, None]
        x = x + self.mix(torch.cat([y, earlier], -1))
        y = self.norm2(x)
        logits = self.router(y).float()
        best, expert = logits.topk(CHOSEN, -1)
        shares = torch.zeros_like(logits).scatter(-1, expert, best.softmax(-1))
        y = self.experts(y.flatten(0, 1), shares.flatten(0, 1).to(y.dtype)).view_as(y)
        return x + y, shares.square().sum(-1)


class Model(nn.Module):
    """Embedding, layers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (samples, tokens, VOCAB), and penalties (samples, tokens)."""
        x = self.embedding(tokens)
        penalty = torch.zeros(tokens.shape)
        for layer in self.layers:
            x, each = layer(x)
            penalty = penalty + each
        return self.head(self.norm(x)), penalty


def texts(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens and the next ones, of which padding does not count."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    ends = torch.randint(3, TOKENS + 1, (4, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= ends, -100)}


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return cross entropy and penalty, summed over tokens that count."""
    logits, penalty = model(batch["tokens"])
    entropy = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return cast("Tensor", entropy + 0.01 * (penalty * (batch["labels"] != -100)).sum())


@subject(
    model=Model,
    loss=token_loss,
    batch=texts,
    optimizer=lambda parameters: AdamW(parameters, lr=2e-3),
    meshes=["dp2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Model, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Divide experts among tensor-parallel ranks, which hold all else in copies; shard over data-parallel ranks."""
    data_mesh = mesh
    if config.mesh == "dp2-tp2":
        data_mesh, tensor_mesh = mesh["dp_shard"], mesh["tp"]
        parallelize_module(model, tensor_mesh, {name: Replicated() for name in ("embedding", "norm", "head")})
        for layer in model.layers:
            parallelize_module(layer, tensor_mesh, {name: Replicated() for name in ("norm1", "mix", "norm2", "router")})
            cast("Layer", layer).experts.divide(tensor_mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=data_mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=data_mesh, mp_policy=config.mixed_precision)
    return model
