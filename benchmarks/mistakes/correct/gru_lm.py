"""Recurrent language model: a cell that computes once for each token, truncated to the batch's length."""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import subject

VOCAB, WIDTH, TOKENS = 30, 18, 6


class Recurrent(nn.Module):
    """Layer of a GRU cell and a learnt initial state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (samples, tokens, WIDTH) for inputs of the same shape."""
        state = self.start.expand(x.shape[0], -1)
        states = []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return torch.stack(states, 1)


class LanguageModel(nn.Module):
    """Embedding, recurrent layers with residuals, and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(Recurrent() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return cast("Tensor", self.head(x))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and the next ones."""
    tokens = torch.randint(1, VOCAB, (4, TOKENS + 1), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (4, 1), generator=generator)
    is_token = torch.arange(TOKENS) < lengths
    return tokens[:, :-1] * is_token, tokens[:, 1:].masked_fill(~is_token, -100)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the summed cross entropy."""
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten(), reduction="sum")


@subject(
    model=LanguageModel,
    loss=loss,
    batch=batch,
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9),
    meshes=["dp2", "hsdp2x2"],
    offload=True,
)
def parallelize(model: LanguageModel, mesh: DeviceMesh, config: Any) -> None:
    """Shard embedding, layers and head each on its own; the root has no parameter."""
    for module in (model.embedding, *model.layers, model.head):
        fully_shard(module, mesh=mesh, offload_policy=config.offload_policy)
    fully_shard(model, mesh=mesh, offload_policy=config.offload_policy)
