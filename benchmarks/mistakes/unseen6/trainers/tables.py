"""Classes of rows of a table (FT-Transformer): a token for each column, and the focal loss; FSDP2 with TP of networks.

conformance judge tables.py:parallelize
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Optimizer

from conformance.subjects import ParallelConfig, subject

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NUMBERS, CATEGORIES, VALUES, WIDTH, HEADS, CLASSES, ROWS = 5, 3, 6, 16, 4, 4, 8
Rows = dict[str, Tensor]


def rows(generator: torch.Generator) -> Rows:
    """Return numbers, categories and classes of rows, in which some classes are unknown."""
    classes = torch.randint(CLASSES, (ROWS,), generator=generator)
    unknown = torch.rand(ROWS, generator=generator) < 0.25
    return {
        "numbers": torch.randn(ROWS, NUMBERS, generator=generator),
        "categories": torch.randint(VALUES, (ROWS, CATEGORIES), generator=generator),
        "labels": classes.masked_fill(unknown, -100),
    }


class Columns(nn.Module):
    """Tokens of the columns: numbers scale a vector, categories choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(NUMBERS, WIDTH) / 4) for _ in range(2))
        self.choice = nn.Parameter(torch.randn(CATEGORIES, VALUES, WIDTH) / 4)
        self.cls = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return tokens, (rows, columns and one, width)."""
        told = numbers[..., None] * self.scale + self.shift
        chosen = self.choice[torch.arange(CATEGORIES, device=categories.device), categories]
        return torch.cat([self.cls.expand(len(numbers), 1, -1), told, chosen], 1)


class Block(nn.Module):
    """Attention of columns, and a gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(F.scaled_dot_product_attention(*parts.unbind()).transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        changed: Tensor = x + self.down(F.relu(self.gate(normed)) * self.up(normed))
        return changed


class TableNet(nn.Module):
    """Transformer over the columns of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = Columns()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return logits of the classes."""
        x = self.columns(numbers, categories)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.relu(self.norm(x[:, 0])))
        return logits


def focal_loss(model: nn.Module, batch: Rows) -> Tensor:
    """Return the focal loss, summed over the rows whose class is known."""
    logits = model(batch["numbers"], batch["categories"]).float()
    known = batch["labels"] != -100
    logs = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[:, None]).squeeze(-1)
    losses = -((1 - logs.exp()) ** 2) * logs
    summed: Tensor = losses.where(known, torch.zeros_like(losses)).sum()
    return summed


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with the momentum of Nesterov and decay of matrices."""
    every = list(parameters)
    matrices, vectors = ([p for p in every if (p.ndim > 1) is wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 1e-2}, {"params": vectors}]
    return SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradients of all meshes by the norm of all, which is returned."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [cast("DTensor", torch.linalg.vector_norm(gradient)).full_tensor() for gradient in gradients]
    norm: Tensor = torch.stack(norms).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@subject(
    model=TableNet,
    loss=focal_loss,
    batch=rows,
    optimizer=make_optimizer,
    clip=clip,
    meshes=["dp2", "hsdp2x2", "dp2-tp2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: TableNet, mesh: DeviceMesh, config: ParallelConfig) -> TableNet:
    """Divide the features of networks by tensor parallelism, and shard the blocks, the tokens and the rest."""
    assert mesh.mesh_dim_names is not None
    if "tp" in mesh.mesh_dim_names:
        for block in model.blocks:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["dp_shard"]
    for module in (*model.blocks, model.columns, model):
        fully_shard(module, mesh=mesh, mp_policy=config.mixed_precision)
    return model
