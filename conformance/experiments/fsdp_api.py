"""FSDP2 API that the reference trainer does not use, tried with a small net.

Weights and inputs are small integers and the number of ranks is a power of two, so that sums and means are exact in
fp32 in any order: a gradient equals that of one process in every bit, or it is wrong.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from reference_trainer.mesh import dp_rank, fsdp_mesh

_SAMPLES, _WIDTH, _INNER = 4, 8, 16

Wrong = dict[str, int]
"""Number of wrong elements or parameters, by kind of the fault."""


@experiment(needs=Needs.TRAINING)
def use_options(rank: RankWorld) -> dict[str, Wrong]:
    """Try options of `fully_shard`, and ways of training."""
    return _try_all(rank, _OPTIONS)


@experiment(needs=Needs.TRAINING)
def use_methods(rank: RankWorld) -> dict[str, Wrong]:
    """Try methods of `FSDPModule`."""
    return _try_all(rank, _METHODS)


@experiment(needs=Needs.TRAINING)
def cast_inputs_and_outputs(rank: RankWorld) -> dict[str, dict[str, str]]:
    """Collect the dtypes of inputs, outputs and gradients of a module with `param_dtype` bf16, by policy.

    The name of a policy is `CAST/OUTPUT`: whether inputs are cast, and the output's dtype (`None`: as computed).
    Without a cast the module's argument is bf16, which its layer needs; all other tensors are fp32.
    """
    dtypes = {}
    for casts, output in product((True, False), (None, torch.float32, torch.bfloat16)):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output, cast_forward_inputs=casts)
        net = _Casting().to(rank.device)
        fully_shard(net, mesh=fsdp_mesh(rank.mesh), mp_policy=policy)
        given = torch.float32 if casts else torch.bfloat16
        dtypes[f"{casts}/{_name(output)}"] = _dtypes(net, rank.device, given)
    return dtypes


class _Net(nn.Module):
    """Net of two layers, and a third layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)
        self.spare = nn.Linear(_WIDTH, _WIDTH)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out

    def doubled(self, x: Tensor) -> Tensor:
        """Compute with the parameters in a method that is not `forward`."""
        out: Tensor = 2 * self.second(self.first(x).relu())
        return out


class _DataParallel:
    """Coordinate and samples of a rank, and the results of one process on the samples of all ranks."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = fsdp_mesh(mesh), device
        self.size, self.rank = self.mesh.size(), dp_rank(mesh)
        generator = torch.Generator().manual_seed(1)
        shape = (self.size, _SAMPLES, _WIDTH)
        self.samples = torch.randint(-2, 3, shape, generator=generator).float().to(device)

    @property
    def own(self) -> Tensor:
        return self.samples[self.rank]

    def net(self, **options: Any) -> _Net:
        return self.shard(_Net().to(self.device), **options)

    def shard(self, net: _Net, **options: Any) -> _Net:
        """Shard both layers, and the root with the spare layer."""
        for module in (net.first, net.second, net):
            fully_shard(module, mesh=self.mesh, **options)
        return net

    def expected(self, single: _Net | None = None) -> dict[str, Tensor | None]:
        """Return the gradients of the mean over ranks of the summed outputs, computed by one process."""
        single = (single or _Net()).to(self.device)
        single(self.samples.flatten(0, 1)).sum().backward()
        return {name: None if p.grad is None else p.grad / self.size for name, p in single.named_parameters()}

    def wrong(self, net: _Net, expected: dict[str, Tensor | None] | None = None, *, factor: float = 1.0) -> Wrong:
        """Count the elements of the sharded net's gradients that are not `factor` times the expected gradients."""
        wrong = {}
        for name, wanted in (expected or self.expected()).items():
            grad = net.get_parameter(name).grad
            if grad is None or wanted is None:
                wrong[f"gradient of {name}"] = 0 if grad is wanted else 1
            else:
                wrong[f"gradient of {name}"] = int((full(grad) != factor * wanted).sum())
        return wrong

    def backward(self, net: _Net) -> _Net:
        net(self.own).sum().backward()
        return net


def _try_all(rank: RankWorld, uses: Mapping[str, Callable[[_DataParallel], Wrong]]) -> dict[str, Wrong]:
    world = _DataParallel(rank.mesh, rank.device)
    return {name: use(world) for name, use in uses.items()}


def _sharded_along_the_last_dimension(world: _DataParallel) -> Wrong:
    net = world.net(shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    return world.wrong(world.backward(net))


def _with_a_frozen_parameter(world: _DataParallel) -> Wrong:
    nets = _Net().to(world.device), _Net()
    for net in nets:
        net.first.weight.requires_grad_(False)
    return world.wrong(world.backward(world.shard(nets[0])), world.expected(nets[1]))


def _with_an_ignored_parameter(world: _DataParallel) -> Wrong:
    """Ignore a parameter: it is neither sharded nor reduced, and its gradient is that of the rank's own samples."""
    net = _Net().to(world.device)
    world.shard(net, ignored_params={net.second.bias})
    expected = world.expected()
    expected["second.bias"] = torch.full((_WIDTH,), float(_SAMPLES), device=world.device)
    return world.wrong(world.backward(net), expected) | {"sharded": int(isinstance(net.second.bias, DTensor))}


def _evaluated_between_steps(world: _DataParallel) -> Wrong:
    net = world.backward(world.net())
    net.zero_grad()
    with torch.no_grad():
        net(world.own)
    return world.wrong(world.backward(net))


def _changed_through_its_state_dict(world: _DataParallel) -> Wrong:
    net, single = world.net(), _Net().to(world.device)
    net(world.own)
    state = net.state_dict()
    wrong = {f"state of {name}": int((full(state[name]) != value).sum()) for name, value in single.state_dict().items()}
    with torch.no_grad():
        net.load_state_dict({name: value * 2 for name, value in state.items()})
        single.load_state_dict({name: value * 2 for name, value in single.state_dict().items()})
    return wrong | world.wrong(world.backward(net), world.expected(single))


def _with_a_divide_factor(world: _DataParallel) -> Wrong:
    """Divide by twice the number of ranks; with a SUM reduction, since gloo has none that multiplies by a factor."""
    net = world.net()
    for module in _fsdp_modules(net):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(2.0 * world.size)
    return world.wrong(world.backward(net), factor=0.5)


def _with_a_hook_on_reduced_gradients(world: _DataParallel) -> Wrong:
    net = world.net()
    for module in _fsdp_modules(net):
        module.set_all_reduce_hook(_triple)
    return world.wrong(world.backward(net), factor=3.0)


def _triple(reduced: Tensor) -> None:
    reduced.mul_(3)


def _unsharded_ahead(world: _DataParallel) -> Wrong:
    net = world.net()
    handle = cast("FSDPModule", net.first).unshard(async_op=True)
    assert handle is not None
    handle.wait()
    unsharded = dict(net.first.named_parameters())
    wrong = {"sharded": _sharded(net.first)}
    single = _Net().to(world.device)
    for name, value in single.first.named_parameters():
        wrong[name] = int((full(unsharded[name]) != value).sum())
    wrong |= world.wrong(world.backward(net))
    cast("FSDPModule", net.first).unshard()
    cast("FSDPModule", net.first).reshard()
    return wrong | {"unsharded": len(unsharded) - _sharded(net.first)}


def _kept_after_forward(world: _DataParallel) -> Wrong:
    net = world.net()
    cast("FSDPModule", net).set_reshard_after_forward(False)
    out = net(world.own)
    wrong = {"sharded": _sharded(net.first)}
    out.sum().backward()
    return wrong | world.wrong(net) | {"unsharded": 2 - _sharded(net.first)}


def _kept_after_backward(world: _DataParallel) -> Wrong:
    net = world.net()
    cast("FSDPModule", net).set_reshard_after_backward(False)
    world.backward(net)
    wrong = {"sharded": _sharded(net.first)}
    for module in _fsdp_modules(net):
        module.reshard()
    return wrong | world.wrong(net)


def _by_another_method(world: _DataParallel) -> Wrong:
    """Compute in another method than forward; one group, since hooks of the layers would unshard in any method."""
    net = _Net().to(world.device)
    fully_shard(net, mesh=world.mesh)
    register_fsdp_forward_method(net, "doubled")
    torch.autograd.backward(net.doubled(world.own).sum())
    return world.wrong(net, factor=2.0)


def _fsdp_modules(net: nn.Module) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def _sharded(module: nn.Module) -> int:
    return sum(isinstance(parameter, DTensor) for parameter in module.parameters())


_OPTIONS = {
    "sharded along the last dimension": _sharded_along_the_last_dimension,
    "with a frozen parameter": _with_a_frozen_parameter,
    "with an ignored parameter": _with_an_ignored_parameter,
    "evaluated between steps": _evaluated_between_steps,
    "changed through its state dict": _changed_through_its_state_dict,
}
_METHODS = {
    "divided by a factor": _with_a_divide_factor,
    "with a hook on reduced gradients": _with_a_hook_on_reduced_gradients,
    "unsharded ahead": _unsharded_ahead,
    "kept after forward": _kept_after_forward,
    "kept after backward": _kept_after_backward,
    "by another method": _by_another_method,
}


class _Casting(nn.Module):
    """Module that records the dtypes of its inputs, direct and nested, and returns some of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor, *, table: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"argument": x, "keyword": table, "inside": others["float"], "integer": others["integer"]}
        self.seen = {name: _name(tensor.dtype) for name, tensor in given.items()}
        return self.layer(x), {"table": table, "integer": others["integer"]}


def _dtypes(net: _Casting, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    x = torch.ones(_SAMPLES, _WIDTH, device=device, dtype=dtype, requires_grad=True)
    floating, integer = torch.ones(2, device=device), torch.ones(2, device=device, dtype=torch.int64)
    out, rest = net(x, table=floating, others={"float": floating, "integer": integer})
    out.sum().backward()
    grad, weight = x.grad, net.layer.weight.grad
    assert grad is not None
    assert weight is not None
    returned = {"output": out, "output inside": rest["table"], "output integer": rest["integer"]}
    gradients = {"gradient of argument": grad, "gradient of weight": weight}
    return net.seen | {name: _name(tensor.dtype) for name, tensor in (returned | gradients).items()}


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
