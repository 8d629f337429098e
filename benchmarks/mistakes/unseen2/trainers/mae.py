"""Masked autoencoder of images, whose checkpoints are full state dicts as other tools read them.

conformance judge mae.py:parallelize
"""

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from conformance.subjects import ParallelConfig, subject

PATCHES, PIXELS, WIDE, NARROW, VISIBLE = 12, 9, 20, 12, 4


def waves(width: int) -> Tensor:
    """Return positions (PATCHES, width) of sines and cosines."""
    phases = torch.arange(PATCHES)[:, None] * 10000 ** -(torch.arange(width // 2) / (width // 2))
    return torch.cat([phases.sin(), phases.cos()], -1)


class Block(nn.Module):
    """Attention and network behind norms, with a learnt scale of each branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, patches, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.gelu(self.up(self.norm2(x)))))


class MaskedAutoencoder(nn.Module):
    """Encoder of visible patches, and decoder of all."""

    wide_positions: Tensor
    narrow_positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDE)
        self.encoder = nn.ModuleList(Block(WIDE) for _ in range(3))
        self.norm = nn.LayerNorm(WIDE)
        self.between = nn.Linear(WIDE, NARROW)
        self.mask = nn.Parameter(torch.randn(1, 1, NARROW) * 0.02)
        self.decoder = nn.ModuleList(Block(NARROW) for _ in range(1))
        self.pixels = nn.Linear(NARROW, PIXELS)
        self.register_buffer("wide_positions", waves(WIDE), persistent=False)
        self.register_buffer("narrow_positions", waves(NARROW), persistent=False)

    def forward(self, patches: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels (samples, PATCHES, PIXELS), and 1.0 for each patch (samples, PATCHES) that was hidden."""
        shuffled = noise.argsort(1)
        restored = shuffled.argsort(1)
        x = self.patch(patches) + self.wide_positions
        x = x.gather(1, shuffled[:, :VISIBLE, None].expand(-1, -1, WIDE))
        for block in self.encoder:
            x = block(x)
        x = self.between(self.norm(x))
        x = torch.cat([x, self.mask.expand(len(x), PATCHES - VISIBLE, -1)], 1)
        x = x.gather(1, restored[..., None].expand(-1, -1, NARROW)) + self.narrow_positions
        for block in self.decoder:
            x = block(x)
        return self.pixels(x), (restored >= VISIBLE).float()


def images(generator: torch.Generator) -> dict[str, Tensor]:
    """Return patches of images, and the noise by which some are hidden."""
    return {
        "patches": torch.randn(5, PATCHES, PIXELS, generator=generator),
        "noise": torch.rand(5, PATCHES, generator=generator),
    }


def reconstruction(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean square error of hidden patches, normalised one by one, summed over images."""
    pixels, is_hidden = model(batch["patches"], batch["noise"])
    target = F.layer_norm(batch["patches"].float(), (PIXELS,))
    errors = (pixels.float() - target).square().mean(-1)
    return cast("Tensor", (errors * is_hidden).sum() / (PATCHES - VISIBLE))


def initialize(model: nn.Module) -> None:
    """Give initial values to a model that has none."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    known = cast("MaskedAutoencoder", model)
    nn.init.normal_(known.mask, std=0.02)
    with torch.no_grad():
        known.wide_positions.copy_(waves(WIDE))
        known.narrow_positions.copy_(waves(NARROW))


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Gather everything on rank 0, which writes one file."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, directory / "checkpoint.pt")
    dist.barrier()


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Read the file, of which each rank takes its shards."""
    content: dict[str, Any] = torch.load(directory / "checkpoint.pt", mmap=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )


@subject(
    model=MaskedAutoencoder,
    loss=reconstruction,
    batch=images,
    optimizer=lambda parameters: AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05),
    initialize=initialize,
    save=save,
    load=load,
    offload=True,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: MaskedAutoencoder, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard two encoder blocks together, and other blocks alone."""
    fully_shard([*model.encoder[:2]], mesh=mesh, **config.policies)
    for block in [*model.encoder[2:], *model.decoder]:
        fully_shard(block, mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)
    return model
