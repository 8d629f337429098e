"""Dispatch tap: operators on DTensors are seen as those on their local tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments.dispatch_tap import DispatchTap


def test_dispatch_tap_sees_local_tensors_of_dtensors(mesh: DeviceMesh) -> None:
    seen: list[tuple[str, tuple[type, ...]]] = []

    def listen(func: Any, args: Any) -> None:
        seen.append((func._schema.name, tuple(type(arg) for arg in args if isinstance(arg, Tensor))))

    left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with DispatchTap([listen]):
        product = left @ right
    assert isinstance(product, DTensor)
    assert ("aten::mm", (Tensor, Tensor)) in seen
    assert all(DTensor not in kinds for _, kinds in seen)
    seen.clear()
    left @ right
    assert seen == []
