"""Low-rank adapters on a frozen base, of which the adapters alone are saved."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import subject

VOCAB, DIM, RANK, TOKENS = 31, 20, 3, 6


class Adapted(nn.Module):
    """Frozen linear layer with a trained update of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, inputs) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(outputs, RANK) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs) of (..., inputs)."""
        return cast("Tensor", self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * (2.0 / RANK))


class Layer(nn.Module):
    """Frozen norm and two adapted layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.norm.requires_grad_(False)
        self.up, self.down = Adapted(DIM, 2 * DIM), Adapted(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of `x`."""
        return cast("Tensor", x + self.down(F.gelu(self.up(self.norm(x)))))


class Adaptation(nn.Module):
    """Frozen embedding and head, and adapted layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        for module in (self.embedding, self.head):
            module.requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(x))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens and labels of the answers."""
    tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
    starts = torch.randint(0, TOKENS - 1, (4, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) < starts, -100)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy."""
    return F.cross_entropy(model(data["tokens"]).flatten(0, 1).float(), data["labels"].flatten(), reduction="sum")


TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Save the adapters and their optimizer."""
    adapters, state = get_state_dict(model, optimizer, options=TRAINED)
    state_dict_saver.save({"adapters": adapters, "optimizer": state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load the adapters and their optimizer."""
    adapters, state = get_state_dict(model, optimizer, options=TRAINED)
    state_dict_loader.load({"adapters": adapters, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=adapters, optim_state_dict=state, options=TRAINED)


def make_optimizer(parameters: Any) -> AdamW:
    """Return AdamW over the parameters that are trained."""
    return AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=5e-3)


@subject(
    model=Adaptation,
    loss=loss,
    batch=batch,
    optimizer=make_optimizer,
    save=save,
    load=load,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Adaptation, mesh: DeviceMesh, config: Any) -> tuple[nn.Module, AdamW]:
    """Shard adapters apart from the base that they adapt."""
    options = {"mesh": mesh, "mp_policy": config.mixed_precision}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, make_optimizer(model.parameters())
