"""Forecast of series by dilated convolutions whose weights are a direction and a length (weight normalisation).

conformance judge weight_norm_tcn.py:parallelize
"""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

from conformance.subjects import subject

CHANNELS, WIDTH, PAST, QUANTILES = 4, 12, 16, (0.1, 0.5, 0.9)


class Temporal(nn.Module):
    """Causal convolution with a residual."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.convolution = weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=dilation))
        self.mix = weight_norm(nn.Conv1d(WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return series of the shape of `x`, (samples, WIDTH, PAST)."""
        y = F.relu(self.convolution(F.pad(x, (2 * self.dilation, 0))))
        return x + cast("Tensor", self.mix(y))


class Forecaster(nn.Module):
    """Projection, temporal layers, and quantiles of the next value of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Conv1d(CHANNELS, WIDTH, 1)
        self.layers = nn.ModuleList(Temporal(2**index) for index in range(3))
        self.outputs = weight_norm(nn.Linear(WIDTH, CHANNELS * len(QUANTILES)))

    def forward(self, series: Tensor) -> Tensor:
        """Return quantiles (samples, CHANNELS, len(QUANTILES)) of series (samples, CHANNELS, PAST)."""
        x = self.inputs(series)
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.outputs(x[..., -1]).unflatten(-1, (CHANNELS, -1)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return random walks, and the step that follows; channels may be without a next value."""
    walks = torch.randn(5, CHANNELS, PAST + 1, generator=generator).cumsum(-1) / 4
    is_known = torch.rand(5, CHANNELS, generator=generator) < 0.8
    return {"series": walks[..., :-1], "next": walks[..., -1], "is_known": is_known}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the pinball loss, summed over channels whose next value is known."""
    quantiles = model(data["series"])
    errors = data["next"][..., None] - quantiles
    levels = torch.tensor(QUANTILES, dtype=errors.dtype)
    losses = torch.maximum(levels * errors, (levels - 1) * errors).sum(-1)
    return (losses * data["is_known"]).sum()


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Save a distributed checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load a distributed checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@subject(
    model=Forecaster,
    loss=loss,
    batch=batch,
    count=lambda data: int(data["is_known"].sum()),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
    save=save,
    load=load,
    meshes=["dp2", "hsdp2x2"],
)
def parallelize(model: Forecaster, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard each layer with its parametrisations."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
