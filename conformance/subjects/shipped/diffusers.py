"""UNet of diffusers under `fully_shard`, trained to predict noise.

Tried with diffusers 0.42.1. https://huggingface.co/docs/diffusers/api/models/unet2d
"""

from functools import partial
from typing import Any

from diffusers import UNet2DModel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import ParallelConfig, denoising, subject

_UNET = partial(
    UNet2DModel,
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=4,
    attention_head_dim=4,
)
"""UNet of two resolutions, with attention at the coarser one."""


@subject(model=_UNET, **denoising((1, 8, 8)), meshes=["dp2", "hsdp2x2"], offload=True)
def diffusers(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard each block, and the root."""
    for block in (*model.down_blocks, model.mid_block, *model.up_blocks, model):
        fully_shard(block, mesh=mesh, **config.policies)
