"""Calls of FSDP2 and of clipping with an argument that differs on the last rank, or that it leaves out.

Right is what a call gives in which all ranks have the arguments of rank 0.
"""

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from conformance.experiments.fsdp_net import DataParallel, Net, fsdp_modules
from conformance.sweeps.rank_trials import OddCall, OddWorld

Options = Callable[[bool], Mapping[str, Any]]
"""Function from whether a rank is the odd one to options."""
Change = Callable[[Net, bool], object]
"""Function that changes a sharded net; its second argument is True on the odd rank."""
Pass = Callable[[DataParallel, Net, int, bool], object]
"""Function that computes the gradients of a micro-batch of this number."""

_FULL_PRECISION, _HALF = MixedPrecisionPolicy(), torch.bfloat16
PASSES = 2
_GROUP_LIMIT = timedelta(seconds=2)


def _backward(data: DataParallel, net: Net, number: int, _is_odd: bool) -> object:
    return data.backward(net, micro_batch=number)


def _training(
    options: Options = lambda _odd: {},
    change: Change = lambda _net, _odd: None,
    *,
    policy: Callable[[bool], MixedPrecisionPolicy] = lambda _odd: _FULL_PRECISION,
    compute: Pass = _backward,
    build: Change = lambda _net, _odd: None,
    has_replicas: bool = False,
) -> OddCall:
    """Return a call that shards a net and computes the gradients of two micro-batches."""

    def call(world: OddWorld) -> dict[str, str]:
        mesh = _replicas(world) if has_replicas else world.mesh
        data = DataParallel(mesh, torch.device("cpu"), world.data_rank, policy(world.is_odd))
        net = _net(world)
        build(net, world.is_odd)
        data.shard(net, **options(world.is_odd))
        change(net, world.is_odd)
        for number in range(PASSES):
            compute(data, net, number, world.is_odd)
        for module in fsdp_modules(net):
            module.reshard()
        return _spelled(data.wrong(net, data.expected(micro_batches=PASSES)))

    return call


def in_parallel(module: nn.Module, world: OddWorld, first: str, second: str) -> None:
    """Share the work of two linear layers among the tensor-parallel ranks, if there are any."""
    if world.tp > 1:
        plan = {first: ColwiseParallel(), second: RowwiseParallel(use_local_output=False)}
        parallelize_module(module, world.grid["tp"], plan)


def _net(world: OddWorld) -> Net:
    """Return a new net; with tensor parallelism all parameters that forward uses are on one mesh, as clipping needs."""
    net = Net()
    in_parallel(net, world, "first", "second")
    if world.tp > 1:
        net.shift = nn.Parameter(DTensor.from_local(net.shift.detach(), world.grid["tp"], [Replicate()]))
    return net


def _spelled(wrong: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count} elements are wrong" for name, count in wrong.items() if count}


def _replicas(world: OddWorld) -> DeviceMesh:
    """Return a mesh of as many replicas as there are ranks."""
    alone = [world.group([rank]) for rank in range(world.size)]
    return DeviceMesh.from_group(
        [world.group(), alone[world.rank]],
        "cpu",
        mesh=torch.arange(world.size).view(-1, 1),
        mesh_dim_names=("replicas", "shards"),
    )


def _root(net: Net) -> FSDPModule:
    return cast("FSDPModule", net)


def _if_odd(action: Callable[[Net], object]) -> Change:
    """Return a change that the odd rank alone makes."""
    return lambda net, odd: action(net) if odd else None


def _forward_alone(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    return net(data.own + number) if odd else data.backward(net, micro_batch=number)


def _without_one(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    """Leave out the last micro-batch on the odd rank, as a rank with fewer samples does."""
    return None if odd and number else data.backward(net, micro_batch=number)


def _evaluating_one(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    with torch.set_grad_enabled(not (odd and number == 0)):
        out = net(data.own + number).sum()
    return out.backward() if out.requires_grad else out


def _with_spare(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    """Use a branch of the net on the odd rank alone, with weights of zero."""
    return net(data.own + number, with_spare=odd).sum().backward()


def _unsharded_before(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    if odd:
        _root(net).unshard()
    return data.backward(net, micro_batch=number)


def _resharded_between(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    loss = net(data.own + number).sum()
    if odd:
        for module in fsdp_modules(net):
            module.reshard()
    return loss.backward()


def _synchronised(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    """Reduce gradients after the last micro-batch, and on the odd rank after each."""
    _root(net).set_requires_gradient_sync(odd or number == PASSES - 1)
    return data.backward(net, micro_batch=number)


def _reduced_over_replicas(data: DataParallel, net: Net, number: int, odd: bool) -> object:
    _root(net).set_requires_all_reduce(odd or number == PASSES - 1)
    return data.backward(net, micro_batch=number)


def _divide(net: Net, odd: bool) -> None:
    """Divide by another number on the odd rank; as sums, since gloo has no reduction that multiplies."""
    for module in fsdp_modules(net):
        module.set_gradient_divide_factor(4.0 if odd else 2.0)
        module.set_force_sum_reduction_for_comms(True)


def _force_sum(net: Net, odd: bool) -> None:
    for module in fsdp_modules(net):
        module.set_force_sum_reduction_for_comms(odd)


def _with_own_group(net: Net) -> None:
    """Make a process group for reductions, with a time limit of seconds."""
    with patch.object(dist, "new_group", partial(dist.new_group, timeout=_GROUP_LIMIT)):
        _root(net).set_separate_reduce_scatter_group()


def _freeze(net: Net) -> None:
    net.first.weight.requires_grad_(False)


def _to_half(net: Net) -> None:
    net.first.to(_HALF)


def _more_rows(net: Net) -> None:
    net.spare = nn.Linear(net.spare.in_features, 2 * net.spare.out_features)


def _one_group_less(world: OddWorld) -> dict[str, str]:
    data = DataParallel(world.mesh, torch.device("cpu"), world.rank, _FULL_PRECISION)
    net = Net()
    for module in [net] if world.is_odd else [net.first, net.second, net]:
        fully_shard(module, mesh=world.mesh)
    data.backward(net)
    return _spelled(data.wrong(net))


def _ignoring_one(world: OddWorld) -> dict[str, str]:
    data = DataParallel(world.mesh, torch.device("cpu"), world.rank, _FULL_PRECISION)
    net = Net()
    data.shard(net, ignored_params={net.shift} if world.is_odd else set())
    data.backward(net)
    return _spelled(data.wrong(net))


def _prefetched_backwards(net: Net) -> None:
    first, second = cast("FSDPModule", net.first), cast("FSDPModule", net.second)
    _root(net).set_modules_to_backward_prefetch([first])
    first.set_modules_to_backward_prefetch([second])


FSDP_CALLS: Mapping[str, OddCall] = {
    "fully_shard: reshard_after_forward": _training(lambda odd: {"reshard_after_forward": not odd}),
    "fully_shard: shard_placement_fn": _training(
        lambda odd: {"shard_placement_fn": lambda p: Shard(p.ndim - 1 if odd else 0)}
    ),
    "fully_shard: offload_policy": _training(
        lambda odd: {"offload_policy": CPUOffloadPolicy(pin_memory=False) if odd else OffloadPolicy()}
    ),
    "fully_shard: ignored_params": _ignoring_one,
    "fully_shard: param_dtype": _training(policy=lambda odd: MixedPrecisionPolicy(param_dtype=_HALF if odd else None)),
    "fully_shard: reduce_dtype": _training(
        policy=lambda odd: MixedPrecisionPolicy(reduce_dtype=_HALF if odd else None)
    ),
    "fully_shard: output_dtype": _training(
        policy=lambda odd: MixedPrecisionPolicy(output_dtype=_HALF if odd else None)
    ),
    "fully_shard: a layer not wrapped": _one_group_less,
    "fully_shard: rows of a parameter": _training(build=_if_odd(_more_rows)),
    "fully_shard: dtype of a parameter": _training(build=_if_odd(_to_half)),
    "fully_shard: frozen parameter": _training(build=_if_odd(_freeze)),
    "set_requires_gradient_sync": _training(compute=_synchronised),
    "set_requires_all_reduce": _training(compute=_reduced_over_replicas, has_replicas=True),
    "set_reshard_after_forward": _training(change=lambda net, odd: _root(net).set_reshard_after_forward(not odd)),
    "set_reshard_after_backward": _training(change=lambda net, odd: _root(net).set_reshard_after_backward(not odd)),
    "set_is_last_backward": _training(change=lambda net, odd: _root(net).set_is_last_backward(not odd)),
    "set_unshard_in_backward": _training(change=lambda net, odd: _root(net).set_unshard_in_backward(not odd)),
    "set_gradient_divide_factor": _training(change=_divide),
    "set_force_sum_reduction_for_comms": _training(change=_force_sum),
    "set_modules_to_forward_prefetch": _training(
        change=_if_odd(lambda net: _root(net).set_modules_to_forward_prefetch([cast("FSDPModule", net.second)]))
    ),
    "set_modules_to_backward_prefetch": _training(change=_if_odd(_prefetched_backwards)),
    "set_reduce_scatter_unused_params": _training(
        change=lambda net, odd: _root(net).set_reduce_scatter_unused_params(odd)
    ),
    "set_separate_reduce_scatter_group": _training(change=_if_odd(_with_own_group)),
    "unshard: not called": _training(compute=_unsharded_before),
    "reshard: not called": _training(compute=_resharded_between),
    "forward and backward: not called": _training(compute=_without_one),
    "backward: not called": _training(compute=_forward_alone),
    "forward: under no_grad": _training(compute=_evaluating_one),
    "forward: another branch": _training(compute=_with_spare),
}
"""Calls of FSDP2 by their names."""

_Clip = Callable[[Net, bool], Tensor | None]


def _clipping(clip: _Clip, *, build: Change = lambda _net, _odd: None, limit: float = 1.0) -> OddCall:
    """Return a call that clips the gradients of a sharded net, by a 2-norm of 1 unless `limit` is another."""

    def call(world: OddWorld) -> dict[str, str]:
        data = DataParallel(world.mesh, torch.device("cpu"), world.data_rank, _FULL_PRECISION)
        net = data.backward(data.shard(_net(world)))
        expected = {name: grad for name, grad in data.expected().items() if grad is not None}
        build(net, world.is_odd)
        clip(net, world.is_odd)
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in expected.values()]))
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        wrong = {}
        for name, grad in expected.items():
            parameter = net.get_parameter(name)
            measured = parameter.grad.full_tensor() if parameter.grad is not None else None  # type: ignore[attr-defined]
            if measured is None or not torch.allclose(measured, grad * factor, rtol=1e-4):
                wrong[name] = f"{None if measured is None else measured.flatten()[:3].tolist()}"
        return wrong

    return call


def _without_gradient(net: Net) -> None:
    net.shift.grad = None


CLIPPING_CALLS: Mapping[str, OddCall] = {
    "clip_grad_norm_: max_norm": _clipping(lambda net, odd: clip_grad_norm_(net.parameters(), 2.0 if odd else 1.0)),
    "clip_grad_norm_: norm_type": _clipping(
        lambda net, odd: clip_grad_norm_(net.parameters(), 1.0, 1.0 if odd else 2.0)
    ),
    "clip_grad_norm_: norm_type inf": _clipping(
        lambda net, odd: clip_grad_norm_(net.parameters(), 1.0, math.inf if odd else 2.0)
    ),
    "clip_grad_norm_: error_if_nonfinite": _clipping(
        lambda net, odd: clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=odd)
    ),
    "clip_grad_norm_: foreach": _clipping(lambda net, odd: clip_grad_norm_(net.parameters(), 1.0, foreach=odd)),
    "clip_grad_norm_: a parameter left out": _clipping(
        lambda net, odd: clip_grad_norm_(list(net.parameters())[int(odd) :], 1.0)
    ),
    "clip_grad_norm_: a parameter without gradient": _clipping(
        lambda net, _odd: clip_grad_norm_(net.parameters(), 1.0), build=_if_odd(_without_gradient)
    ),
    "clip_grad_norm_: order of parameters": _clipping(
        lambda net, odd: clip_grad_norm_(list(net.parameters())[:: -1 if odd else 1], 1.0)
    ),
    "clip_grad_norm_: not called": _clipping(lambda net, odd: None if odd else clip_grad_norm_(net.parameters(), 1.0)),
    "clip_grad_value_: not called": _clipping(
        lambda net, odd: None if odd else clip_grad_value_(net.parameters(), 1e9), limit=math.inf
    ),
}
"""Calls of clipping by their names."""
