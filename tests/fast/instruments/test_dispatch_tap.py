"""Dispatch tap: operators on DTensors are seen as those on their local tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments.dispatch_tap import DispatchTap, Handler


def test_dispatch_tap_sees_local_tensors_of_dtensors(mesh: DeviceMesh) -> None:
    seen: list[tuple[str, tuple[type, ...]]] = []
    asked: list[Any] = []

    def listen(func: Any) -> Handler:
        asked.append(func)
        name = func._schema.name
        return lambda args: seen.append((name, tuple(type(arg) for arg in args if isinstance(arg, Tensor))))

    left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with DispatchTap([listen]):
        product = left @ right
        left @ right
    assert isinstance(product, DTensor)
    assert seen.count(("aten::mm", (Tensor, Tensor))) == 2
    assert asked.count(torch.ops.aten.mm.default) == 1
    assert all(DTensor not in kinds for _, kinds in seen)
    seen.clear()
    left @ right
    assert seen == []


def test_results_that_nobody_has_awaited_are_seen_as_plain_tensors(mesh: DeviceMesh) -> None:
    """The second of two reductions, over two mesh dimensions, gets the unawaited result of the first."""
    seen: list[str] = []
    pending = all_reduce(torch.ones(2), "sum", mesh)
    assert type(pending) is not Tensor
    with DispatchTap([lambda func: lambda _: seen.append(func._schema.name)]):
        total = all_reduce(pending, "sum", mesh) + 0
    assert total.tolist() == [1.0, 1.0]
    assert seen.count("_c10d_functional::all_reduce") == 1


def test_operators_that_no_listener_handles_run(mesh: DeviceMesh) -> None:
    with DispatchTap([lambda _: None]):
        total = torch.ones(2) + distribute_tensor(torch.ones(2), mesh, [Replicate()]).to_local()
    assert total.tolist() == [2.0, 2.0]
