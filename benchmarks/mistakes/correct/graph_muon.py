"""Graph attention on small graphs, trained by Muon, which gathers each matrix to orthogonalise its update."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from conformance.subjects import subject

FEATURES, WIDTH, NODES, KINDS = 6, 12, 8, 4


class GraphAttention(nn.Module):
    """Attention of each node to its neighbours and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(WIDTH, WIDTH)
        self.source, self.target = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return features (graphs, NODES, WIDTH) of nodes, given which of them are neighbours."""
        scores = F.leaky_relu(self.target(x) + self.source(x).transpose(1, 2), 0.2)
        weights = scores.masked_fill(~edges, float("-inf")).softmax(-1)
        return x + F.elu(weights @ self.values(x))


class GraphNetwork(nn.Module):
    """Layers of graph attention, and a kind for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, KINDS)
        self.layers = nn.ModuleList(GraphAttention() for _ in range(2))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return logits (graphs, NODES, KINDS)."""
        x = self.inputs(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return cast("Tensor", self.outputs(x))


class Muon(Optimizer):
    """Momentum whose update is orthogonalised for matrices (Newton-Schulz), and a plain one for vectors."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("momentum", torch.zeros_like(parameter))
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
                update = state["momentum"]
                parameter.sub_(group["lr"] * (orthogonalised(update) if update.ndim == 2 else update))


def orthogonalised(update: Tensor) -> Tensor:
    """Return a matrix with singular values near one, of the layout of `update`."""
    full = update.full_tensor() if isinstance(update, DTensor) else update
    x = full / (full.norm() + 1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return distribute_tensor(x, update.device_mesh, update.placements) if isinstance(update, DTensor) else x


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return nodes, edges in both directions, and the kinds of some nodes."""
    edges = torch.rand(4, NODES, NODES, generator=generator) < 0.3
    edges = edges | edges.transpose(1, 2) | torch.eye(NODES, dtype=torch.bool)
    kinds = torch.randint(KINDS, (4, NODES), generator=generator)
    is_known = torch.rand(4, NODES, generator=generator) < 0.6
    nodes = torch.randn(4, NODES, FEATURES, generator=generator)
    return {"nodes": nodes, "edges": edges, "kinds": kinds, "is_known": is_known}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy, summed over the nodes of known kind."""
    losses = F.cross_entropy(model(data["nodes"], data["edges"]).transpose(1, 2), data["kinds"], reduction="none")
    return (losses * data["is_known"]).sum()


@subject(
    model=GraphNetwork,
    loss=loss,
    batch=batch,
    count=lambda data: int(data["is_known"].sum()),
    optimizer=Muon,
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: GraphNetwork, mesh: DeviceMesh, config: Any) -> None:
    """Shard layer by layer."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
