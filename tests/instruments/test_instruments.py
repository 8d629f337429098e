"""Instruments without a training run: collectives, operators, poison, fingerprints and owners of parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments.capture import fingerprint
from conformance.instruments.collectives import CollectiveLog, collective_kind
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.poison import INTEGER_POISON, Poison, poison_, poisoned_elements
from conformance.instruments.sharding import fsdp_group_of, full, is_sharded_by_fsdp
from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer

# Collectives


def operators() -> list[str]:
    """All operators of c10d that this torch has."""
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
        ("c10d::allgather_into_tensor_coalesced_", "all_gather"),
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
    entries = [(e.step, e.phase, e.kind, e.numel, e.nbytes, e.dtype, e.reduce_op) for e in log.facts(mesh)]
    assert entries == [
        (-1, "build", "all_reduce", 6, 12, "bfloat16", "MAX"),
        (2, "forward", "all_gather", 3, 12, "float32", None),
        (2, "forward", "broadcast", 2, 16, "int64", None),
    ]
    assert {e.group for e in log.facts(mesh)} == {"dp_shard"}


def test_the_tap_sees_inside_dtensors(mesh: DeviceMesh) -> None:
    seen: list[tuple[str, tuple[type, ...]]] = []

    def listen(func: Any, args: Any) -> None:
        seen.append((func._schema.name, tuple(type(a) for a in args if isinstance(a, Tensor))))

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


# Poison, fingerprints, sharding


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [
        (torch.float32, 6),
        (torch.bfloat16, 6),
        (torch.complex64, 6),
        (torch.int64, 6),
        (torch.int8, 6),
        (torch.uint8, 6),
        (torch.bool, 0),
    ],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_poison(mesh: DeviceMesh, dtype: torch.dtype, counted: int, distributed: bool) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    if distributed:
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    assert poisoned_elements(tensor) == 0
    poison_(tensor)
    assert poisoned_elements(tensor) == counted
    if not dtype.is_floating_point and not dtype.is_complex:
        assert set(full(tensor).flatten().tolist()) == {True if dtype == torch.bool else INTEGER_POISON}


def test_poison_finds_what_initialisation_forgets() -> None:
    model = Transformer(ModelConfig(n_layers=1, dim=8, n_heads=2, n_kv_heads=1, ffn_dim=8))
    poison = Poison()
    poison.materialized(model)
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert poison.poisoned.keys() == names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "norm.weight":
                parameter.zero_()
    model.rope_table[0].zero_()
    poison.initialized(model)
    forgotten = {name: number for name, number in poison.surviving.items() if number}
    assert forgotten == {"norm.weight": 8, "rope_table": model.rope_table.numel() // 2}


def test_fingerprint() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    same = [tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor, tensor])[:2]]
    others = [
        tensor.reshape(3, 2),
        tensor.double(),
        tensor.view(torch.int32),
        tensor.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0)),
        tensor.nextafter(torch.full_like(tensor, 9.0)),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ]
    assert {fingerprint(other) for other in same} == {fingerprint(tensor)}
    assert len({fingerprint(other) for other in [tensor, *others]}) == len(others) + 1


def test_who_owns_and_shards_a_parameter(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not any(is_sharded_by_fsdp(p) for p in model.parameters())
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(is_sharded_by_fsdp(p) for p in model.parameters())
    assert set(fsdp_group_of(model).items()) == {
        ("0.weight", ""),
        ("0.bias", ""),
        ("1.0.weight", "1"),
        ("1.0.bias", "1"),
    }
