"""Collectives and other operators as the dispatch tap sees them, and the log of collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments.collectives import CollectiveLog, collective_kind
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


def test_unawaited_results_are_seen_as_plain_tensors(mesh: DeviceMesh) -> None:
    """The second of two reductions, over two mesh dimensions, gets the unawaited result of the first."""
    seen: list[str] = []
    pending = all_reduce(torch.ones(2), "sum", mesh)
    assert type(pending) is not Tensor
    with DispatchTap([lambda _: None, lambda func: lambda _: seen.append(func._schema.name)]):
        total = all_reduce(pending, "sum", mesh) + 0
    assert total.tolist() == [1.0, 1.0]
    assert seen.count("_c10d_functional::all_reduce") == 1


def operators() -> list[str]:
    """Return the names of all operators of c10d that this torch has."""
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name for schema in schemas}
    return sorted(name for name in names if name.startswith(("c10d::", "_c10d_functional::")))


@pytest.mark.parametrize("operator", operators())
def test_the_kind_of_every_operator_is_known(operator: str) -> None:
    name = operator.partition("::")[2].replace("_", "")
    kind = collective_kind(operator)
    if kind is None:
        assert any(word in name for word in ("wait", "wrap", "send", "recv", "p2p", "nan", "monitored")), operator
    else:
        assert kind.replace("_", "") in name


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::scatter_", "scatter"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::barrier", "barrier"),
        ("c10d::monitored_barrier_", None),
        ("c10d::send", None),
        ("_c10d_functional::all_reduce_coalesced", "all_reduce"),
        ("_c10d_functional::wait_tensor", None),
    ],
)
def test_kinds_of_collectives(operator: str, kind: str | None) -> None:
    assert collective_kind(operator) == kind


def test_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="unknown collective c10d::teleport_"):
        collective_kind("c10d::teleport_")


def test_collective_log(mesh: DeviceMesh) -> None:
    log = CollectiveLog()
    tensor = torch.ones(6, dtype=torch.bfloat16)
    with DispatchTap([log.listen]) as tap:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        log.phase("forward", step=2)
        dist.all_gather([torch.empty(3)], torch.ones(3), group=mesh.get_group())
        with tap.paused():
            dist.all_reduce(tensor)
        dist.broadcast(torch.ones(2, dtype=torch.int64), src=0)
        torch.ones(2).add(1)
    collectives = [(c.step, c.phase, c.kind, c.numel, c.nbytes, c.dtype, c.reduce_op) for c in log.facts(mesh)]
    assert collectives == [
        (-1, "build", "all_reduce", 6, 12, "bfloat16", "MAX"),
        (2, "forward", "all_gather", 3, 12, "float32", None),
        (2, "forward", "broadcast", 2, 16, "int64", None),
    ]
    assert {collective.group for collective in log.facts(mesh)} == {"dp_shard"}
