"""Calls of DTensor and DeviceMesh with an argument that differs on the last rank, or that it leaves out.

Right is what a call gives in which all ranks have the arguments of rank 0.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from conformance.instruments.sharding import full
from conformance.sweeps.layouts import difference
from conformance.sweeps.rank_trials import OddCall, OddWorld

_FULL = torch.arange(24.0).view(6, 4)
_ROWS, _COLUMNS, _COPIES = Shard(0), Shard(1), Replicate()


def _judged(make: Callable[[OddWorld, bool], Tensor | None], expected: Tensor = _FULL) -> OddCall:
    """Return a call that compares the shards of a tensor, and then the tensor that ranks gather, with a full one."""

    def call(world: OddWorld) -> dict[str, str]:
        measured = make(world, world.is_odd)
        if measured is None:
            return {}
        wrong = {"shard": difference(measured, expected, bound=0.0)}
        if isinstance(measured, DTensor):
            wrong["full tensor"] = difference(measured.full_tensor(), expected, bound=0.0)
        return {name: text for name, text in wrong.items() if text}

    return call


def _distributed(
    value: Tensor, world: OddWorld, placement: Placement = _ROWS, *, src_data_rank: int | None = 0
) -> DTensor:
    return distribute_tensor(value, world.mesh, [placement], src_data_rank=src_data_rank)


def _shard(world: OddWorld, placement: Placement = _ROWS) -> Tensor:
    """Return this rank's rows or columns, or a copy, as a plain tensor."""
    dim = getattr(placement, "dim", None)
    return _FULL.clone() if dim is None else _FULL.tensor_split(world.mesh.size(), dim)[world.data_rank].contiguous()


def _local(world: OddWorld, placement: Placement = _ROWS) -> DTensor:
    return DTensor.from_local(_shard(world, placement), world.mesh, [placement])


def _added(world: OddWorld, odd: bool) -> Tensor:
    return _local(world) + 0 * _local(world, _COLUMNS if odd else _ROWS)


def _redistributed_backward(world: OddWorld, odd: bool) -> Tensor:
    leaf = cast("DTensor", _local(world).requires_grad_())
    copies = leaf.redistribute(placements=[_COPIES]).to_local(grad_placements=[Partial() if odd else _COPIES])
    torch.autograd.backward(copies.sum())
    assert leaf.grad is not None
    return leaf.grad


def _loss(world: OddWorld, odd: bool) -> Tensor:
    logits = _local(world, _COLUMNS)
    labels = torch.arange(6) % 4
    if odd:
        with loss_parallel():
            loss = nn.functional.cross_entropy(logits, labels)
    else:
        loss = nn.functional.cross_entropy(logits.redistribute(placements=[_COPIES]), labels)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _linear() -> nn.Linear:
    linear = nn.Linear(4, 6, bias=False)
    linear.weight.data.copy_(_FULL)
    return linear


def _parallelized(world: OddWorld, odd: bool) -> Tensor:
    plan = RowwiseParallel() if odd else ColwiseParallel(output_layouts=_COPIES)
    linear = parallelize_module(_linear(), world.mesh, plan)
    out: Tensor = linear(torch.eye(4).tensor_split(world.mesh.size(), 1)[world.data_rank] if odd else torch.eye(4))
    return out


def _parallelized_or_not(world: OddWorld, odd: bool) -> Tensor:
    linear = _linear()
    if not odd:
        parallelize_module(linear, world.mesh, ColwiseParallel(output_layouts=_COPIES))
    out: Tensor = linear(torch.eye(4))
    return out


def _distributed_module(world: OddWorld, odd: bool) -> Tensor:
    weight: Tensor = distribute_module(_linear(), world.mesh, _cut(odd)).get_parameter("weight")
    return weight


def _cut(odd: bool) -> Callable[[str, nn.Module, DeviceMesh], None]:
    def cut(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = distribute_tensor(module.get_parameter("weight").detach(), mesh, [_COLUMNS if odd else _ROWS])
        module.register_parameter("weight", nn.Parameter(weight))

    return cut


def _mesh_of_shape(world: OddWorld, odd: bool) -> Tensor:
    shape, names = ((1, world.size), ("one", "two")) if odd else ((world.size,), ("two",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return distribute_tensor(_FULL, mesh["two"], [_ROWS])


def _mesh_of_names(world: OddWorld, odd: bool) -> Tensor:
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("other" if odd else "ranks",))
    return distribute_tensor(_FULL, mesh, [_ROWS])


def _mesh_of_ranks(world: OddWorld, odd: bool) -> Tensor:
    ranks = torch.arange(world.size)
    return distribute_tensor(_FULL, DeviceMesh("cpu", ranks.flip(0) if odd else ranks), [_ROWS])


def _copies_of(world: OddWorld, odd: bool, *, run_check: bool) -> Tensor:
    return DTensor.from_local(_FULL + odd, world.mesh, [_COPIES], run_check=run_check)


DTENSOR_CALLS: Mapping[str, OddCall] = {
    "distribute_tensor: values": _judged(lambda world, odd: _distributed(_FULL + odd, world)),
    "distribute_tensor: values to replicate": _judged(lambda world, odd: _distributed(_FULL + odd, world, _COPIES)),
    "distribute_tensor: values, src_data_rank=None": _judged(
        lambda world, odd: _distributed(_FULL + odd, world, _COPIES, src_data_rank=None)
    ),
    "distribute_tensor: src_data_rank": _judged(
        lambda world, odd: _distributed(_FULL, world, src_data_rank=None if odd else 0)
    ),
    "distribute_tensor: number of src_data_rank": _judged(
        lambda world, odd: _distributed(_FULL + odd, world, src_data_rank=int(odd))
    ),
    "distribute_tensor: placements": _judged(lambda world, odd: _distributed(_FULL, world, _COLUMNS if odd else _ROWS)),
    "distribute_tensor: shard or replicate": _judged(
        lambda world, odd: _distributed(_FULL, world, _COPIES if odd else _ROWS)
    ),
    "distribute_tensor: shape": _judged(lambda world, odd: _distributed(_FULL[: 4 if odd else 6], world)),
    "distribute_tensor: dtype": _judged(lambda world, odd: _distributed(_FULL.double() if odd else _FULL, world)),
    "distribute_tensor: not called": _judged(lambda world, odd: None if odd else _distributed(_FULL, world)),
    "redistribute: placements": _judged(
        lambda world, odd: _local(world).redistribute(placements=[_COLUMNS if odd else _COPIES])
    ),
    "redistribute: pending sum": _judged(
        lambda world, odd: DTensor.from_local(_FULL / world.mesh.size(), world.mesh, [Partial()]).redistribute(
            placements=[_ROWS if odd else _COPIES]
        )
    ),
    "redistribute: async_op": _judged(
        lambda world, odd: _local(world).redistribute(placements=[_COPIES], async_op=odd)
    ),
    "redistribute: forward_dtype": _judged(
        lambda world, odd: _local(world).redistribute(
            placements=[_COPIES], forward_dtype=torch.float64 if odd else None
        )
    ),
    "redistribute: not called": _judged(
        lambda world, odd: None if odd else _local(world).redistribute(placements=[_COPIES])
    ),
    "full_tensor: not called": _judged(lambda world, odd: None if odd else _local(world).full_tensor()),
    "to_local: grad_placements": _judged(_redistributed_backward, torch.ones(6, 4)),
    "from_local: values, run_check=True": _judged(lambda world, odd: _copies_of(world, odd, run_check=True)),
    "from_local: values, run_check=False": _judged(lambda world, odd: _copies_of(world, odd, run_check=False)),
    "from_local: run_check": _judged(
        lambda world, odd: DTensor.from_local(_FULL.clone(), world.mesh, [_COPIES], run_check=not odd)
    ),
    "from_local: rows of a shard": _judged(
        lambda world, odd: DTensor.from_local(_shard(world)[: 2 if odd else 3], world.mesh, [_ROWS])
    ),
    "from_local: rows of a shard, run_check=True": _judged(
        lambda world, odd: DTensor.from_local(_shard(world)[: 2 if odd else 3], world.mesh, [_ROWS], run_check=True)
    ),
    "from_local: shape": _judged(
        lambda world, odd: DTensor.from_local(
            _shard(world), world.mesh, [_ROWS], shape=torch.Size((8 if odd else 6, 4)), stride=(4, 1)
        )
    ),
    "from_local: placements": _judged(
        lambda world, odd: DTensor.from_local(_shard(world), world.mesh, [_COPIES if odd else _ROWS])
    ),
    "from_local: dtype": _judged(
        lambda world, odd: DTensor.from_local(_shard(world).double() if odd else _shard(world), world.mesh, [_ROWS])
    ),
    "operator: placements of an operand": _judged(_added),
    "operator: sum not called": _judged(lambda world, odd: None if odd else full(_local(world).sum()), _FULL.sum()),
    "loss_parallel: not called": _judged(_loss, nn.functional.cross_entropy(_FULL, torch.arange(6) % 4)),
    "parallelize_module: style": _judged(_parallelized, _FULL.T.contiguous()),
    "parallelize_module: not called": _judged(_parallelized_or_not, _FULL.T.contiguous()),
    "distribute_module: placements": _judged(_distributed_module),
    "init_device_mesh: shape": _judged(_mesh_of_shape),
    "init_device_mesh: names": _judged(_mesh_of_names),
    "DeviceMesh: order of ranks": _judged(_mesh_of_ranks),
}
"""Calls of DTensor by their names."""
