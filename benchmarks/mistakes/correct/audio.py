"""Dilated convolutions that predict the next sample of a waveform, with gates and skip connections."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from conformance.subjects import subject

CHANNELS, LENGTH = 12, 40


class Gated(nn.Module):
    """Causal convolution with a dilation, a gate, and outputs for the next layer and for the end."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(CHANNELS, 2 * CHANNELS, 2, dilation=dilation)
        self.out = nn.Conv1d(CHANNELS, 2 * CHANNELS, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next features, of the shape of `x`, (samples, CHANNELS, time), and those that are skipped."""
        value, gate = self.conv(nn.functional.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        residual, skipped = self.out(value.tanh() * gate.sigmoid()).chunk(2, dim=1)
        return x + residual, skipped


class WaveModel(nn.Module):
    """Stack of gated convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Conv1d(1, CHANNELS, 1)
        self.stages = nn.ModuleList(Gated(2**power) for power in range(4))
        self.gain = nn.Parameter(torch.ones(1))
        self.outputs = nn.Conv1d(CHANNELS, 1, 1)

    def forward(self, wave: Tensor) -> Tensor:
        """Return the next sample at each time of waveforms (samples, 1, time)."""
        x = self.inputs(wave.to(self.inputs.weight.dtype))
        total = torch.zeros_like(x)
        for stage in self.stages:
            x, skipped = stage(x)
            total = total + skipped
        return cast("Tensor", self.outputs(total.relu()) * self.gain)


def batch(generator: torch.Generator) -> Tensor:
    """Return waveforms (samples, 1, LENGTH + 1)."""
    return torch.randn(4, 1, LENGTH + 1, generator=generator).cumsum(-1) / 4


def loss(model: nn.Module, wave: Tensor) -> Tensor:
    """Return the absolute error, averaged over time and summed over samples."""
    error = model(wave[..., :-1]).float() - wave[..., 1:].float()
    return nn.functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none").mean(-1).sum()


@subject(
    model=WaveModel,
    loss=loss,
    batch=batch,
    optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=2e-3),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: WaveModel, mesh: DeviceMesh, config: Any) -> WaveModel:
    """Shard stages in pairs, which stay gathered until backward, and let each pair prefetch the next one."""
    options = {"mesh": mesh, "mp_policy": config.mixed_precision}
    pairs = [[model.stages[0], model.stages[1]], [model.stages[2], model.stages[3]]]
    for pair in pairs:
        fully_shard(pair, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    cast("FSDPModule", model.stages[0]).set_modules_to_forward_prefetch([cast("FSDPModule", model.stages[2])])
    cast("FSDPModule", model.stages[2]).set_modules_to_backward_prefetch([cast("FSDPModule", model.stages[0])])
    return model
