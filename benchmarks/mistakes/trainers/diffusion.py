"""Denoising diffusion with a custom autograd function, in the style of a training script for images.

    conformance judge benchmarks/mistakes/trainers/diffusion.py:parallelize

The modulation of features by the time step is a function with its own backward pass; layers of the network are
checkpointed; the model may be made on the meta device.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from conformance.subjects import subject

CHANNELS, SIZE, STEPS = 16, 6, 20


class Modulate(torch.autograd.Function):
    """Product of features with one plus a scale, plus a shift; nothing else is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return features of the shape of `x`, (samples, channels, height, width)."""
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift[..., None, None], x, 1 + scale[..., None, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of features, scale and shift."""
        x, scale = ctx.saved_tensors
        return grad * (1 + scale[..., None, None]), (grad * x).sum((2, 3)), grad.sum((2, 3))


class ResidualBlock(nn.Module):
    """Two convolutions, the second one behind the modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, CHANNELS), nn.GroupNorm(4, CHANNELS, affine=False)
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(CHANNELS, 2 * CHANNELS)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features of the shape of `x`."""
        scale, shift = self.time(F.silu(time)).chunk(2, dim=-1)
        y = self.norm2(self.conv1(F.silu(self.norm1(x))))
        return cast("Tensor", x + self.conv2(F.silu(Modulate.apply(y, scale, shift))))  # type: ignore[no-untyped-call]


class Denoiser(nn.Module):
    """Network that predicts the noise in an image."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 1, 3, padding=1)
        self.time_mlp = nn.Linear(CHANNELS, CHANNELS)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.register_buffer("frequencies", torch.empty(CHANNELS // 2))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise parameters and buffers, also after `to_empty`."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm):
                module.reset_parameters()
        self.frequencies.copy_(torch.logspace(0, 2, CHANNELS // 2) / STEPS)

    def forward(self, noisy: Tensor, steps: Tensor) -> Tensor:
        """Return the noise in images (samples, 1, SIZE, SIZE) after a number of steps, (samples,)."""
        angles = steps[:, None] * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.time_mlp.weight.dtype)
        time = self.time_mlp(time)
        x = self.stem(noisy.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, time, use_reentrant=False)
        return cast("Tensor", self.out(F.silu(x)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return images, noise, and the step at which each image is denoised."""
    images, noise = (torch.randn(4, 1, SIZE, SIZE, generator=generator) for _ in range(2))
    return {"images": images, "noise": noise, "steps": torch.randint(1, STEPS, (4,), generator=generator)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the squared error of the predicted noise, averaged over pixels and summed over images."""
    kept = (data["steps"].to(data["images"].dtype) / STEPS * torch.pi / 2).cos()[:, None, None, None]
    noisy = kept * data["images"] + (1 - kept.square()).sqrt() * data["noise"]
    error = model(noisy, data["steps"]) - data["noise"]
    return cast("Tensor", error.float().square().mean((1, 2, 3)).sum())


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Save full tensors on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if torch.distributed.get_rank() == 0:
        torch.save(state, directory / "last.pt")


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load full tensors on each rank."""
    state = torch.load(directory / "last.pt")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=2e-3)


@subject(
    model=Denoiser,
    loss=loss,
    batch=batch,
    initialize=Denoiser.init_weights,  # type: ignore[arg-type]
    optimizer=make_optimizer,
    save=save,
    load=load,
    precisions=["fp32", "bf16"],
)
def parallelize(model: Denoiser, mesh: DeviceMesh, config: Any) -> tuple[Denoiser, Optimizer]:
    """Shard block by block, and make the optimizer."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model, make_optimizer(model.parameters())
