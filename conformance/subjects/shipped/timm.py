"""Vision transformer of timm under `fully_shard`, also from the meta device.

Tried with timm 1.0.31. https://huggingface.co/docs/timm
"""

from functools import partial
from typing import Any

from timm.models import VisionTransformer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from conformance.subjects import ParallelConfig, classification, subject

CLASSES, SIZE = 5, 16


@subject(
    model=partial(
        VisionTransformer, img_size=SIZE, patch_size=SIZE // 2, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=3
    ),
    **classification((3, SIZE, SIZE), CLASSES),
    initialize=VisionTransformer.init_weights,
    optimizer=partial(AdamW, lr=1e-3),
    meshes=["dp2", "hsdp2x2"],
)
def timm(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard each block, and the root."""
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, **config.policies)
