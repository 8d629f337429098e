"""Autoencoder of signals with a learnt codebook (VQ-VAE): the nearest code is passed on, with a straight gradient.

conformance judge vq_vae.py:parallelize
"""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import ParallelConfig, subject

CHANNELS, LENGTH, CODES, WIDTH = 3, 16, 12, 10


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv1, self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (signals, WIDTH, length)."""
        return cast("Tensor", x + self.conv2(F.relu(self.conv1(F.relu(self.norm(x))))))


class Quantizer(nn.Module):
    """Codebook, whose nearest code replaces a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CODES, WIDTH)
        nn.init.uniform_(self.codes.weight, -1.0, 1.0)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (signals, WIDTH, length), and the distance from them for each signal, (signals,)."""
        vectors = z.transpose(1, 2).float()
        distances = torch.cdist(vectors.detach(), self.codes.weight.detach().float().expand(len(z), -1, -1))
        code = self.codes(distances.argmin(-1)).float()
        to_code = (code - vectors.detach()).square().mean((1, 2))
        to_vector = (vectors - code.detach()).square().mean((1, 2))
        passed = vectors + (code - vectors).detach()
        return passed.transpose(1, 2).to(z.dtype), to_code + 0.25 * to_vector


class VectorQuantizedAutoencoder(nn.Module):
    """Encoder by strides, codebook, and decoder by transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(CHANNELS, WIDTH, 4, stride=2, padding=1), Residual(), nn.Conv1d(WIDTH, WIDTH, 4, 2, 1)
        )
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2, 1), Residual(), nn.ConvTranspose1d(WIDTH, CHANNELS, 4, 2, 1)
        )

    def forward(self, signals: Tensor) -> tuple[Tensor, Tensor]:
        """Return signals (signals, CHANNELS, LENGTH), and the distance from codes (signals,)."""
        codes, distance = self.quantizer(self.encoder(signals))
        return self.decoder(codes), distance


def signals(generator: torch.Generator) -> Tensor:
    """Return sums of two waves in each channel."""
    time = torch.linspace(0, 1, LENGTH)
    rates, phases = (torch.rand(6, CHANNELS, 2, 1, generator=generator) * scale for scale in (20.0, 6.28))
    return (rates * time + phases).sin().sum(2)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the error of reconstruction and the distance from codes, summed over signals."""
    reconstructed, distance = model(batch)
    errors = F.l1_loss(reconstructed.float(), batch.float(), reduction="none").mean((1, 2))
    return cast("Tensor", (errors + distance).sum())


@subject(
    model=VectorQuantizedAutoencoder,
    loss=loss,
    batch=signals,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: VectorQuantizedAutoencoder, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard the three modules, which have all parameters."""
    for module in (model.encoder, model.quantizer, model.decoder):
        fully_shard(module, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
