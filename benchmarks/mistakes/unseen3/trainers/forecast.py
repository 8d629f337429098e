"""Forecast of quantiles by patches of a series that is normalised by its own mean and deviation (RevIN).

conformance judge forecast.py:parallelize
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import ParallelConfig, subject

LENGTH, PATCH, HORIZON, DIM, VARIATES = 24, 4, 6, 14, 3
Series = dict[str, Tensor]


class ReversibleNorm(nn.Module):
    """Normalisation of a series, which is undone after the forecast."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(VARIATES, 1)), nn.Parameter(torch.zeros(VARIATES, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the series (samples, VARIATES, LENGTH), with its mean and deviation."""
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        return (x - mean) / deviation * self.gain + self.offset, mean, deviation


class Forecaster(nn.Module):
    """Channels are forecast independently, by patches."""

    quantiles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = ReversibleNorm()
        self.register_buffer("quantiles", torch.tensor([0.1, 0.5, 0.9]), persistent=False)
        self.patch = nn.Linear(PATCH, DIM)
        self.positions = nn.Parameter(torch.randn(LENGTH // PATCH, DIM) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 24, dropout=0.0, activation="gelu", batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(LENGTH // PATCH * DIM, HORIZON * 3)

    def forward(self, past: Tensor) -> Tensor:
        """Return quantiles (samples, VARIATES, HORIZON, 3)."""
        x, mean, deviation = self.norm(past)
        x = self.patch(x.unflatten(-1, (-1, PATCH)).flatten(0, 1)) + self.positions
        for layer in self.layers:
            x = layer(x)
        y = self.head(x.flatten(1)).view(len(past), VARIATES, HORIZON, 3)
        return cast("Tensor", y * deviation[..., None] + mean[..., None])


def series(generator: torch.Generator) -> Series:
    """Return random walks; some values of the future are missing."""
    walks = torch.randn(5, VARIATES, LENGTH + HORIZON, generator=generator).cumsum(-1)
    return {
        "past": walks[..., :LENGTH],
        "future": walks[..., LENGTH:],
        "is_known": torch.rand(5, VARIATES, HORIZON, generator=generator) < 0.7,
    }


def pinball(model: nn.Module, batch: Series) -> Tensor:
    """Return the loss of quantiles, summed over known values."""
    errors = batch["future"][..., None].float() - model(batch["past"]).float()
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    losses = torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean(-1)
    return (losses * batch["is_known"]).sum()


@subject(
    model=Forecaster,
    loss=pinball,
    batch=series,
    count=lambda batch: int(batch["is_known"].sum()),
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=5e-2),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
)
def parallelize(model: Forecaster, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard layers, of which the last stays gathered until backward."""
    fully_shard(model.layers[0], mesh=mesh, **config.policies)
    fully_shard(model.layers[1], mesh=mesh, **config.policies, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, **config.policies)
    return model
