"""What ranks measure of FSDP2's interface where the reference trainer does not use it, with a small net.

Weights and inputs are small whole numbers and worlds have a power of two of ranks, so that sums and means are exact in
fp32 whatever their order: a gradient is that of one process in every bit, or it is wrong.
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.experiments.training import rank_config
from conformance.instruments.sharding import full
from conformance.run.ranks.messages import RankContext
from reference_trainer.mesh import build_mesh, destroy_process_group, dp_rank, fsdp_mesh
from reference_trainer.parallel_dims import resolve_mesh

_SAMPLES, _WIDTH, _INNER = 4, 8, 16

Found = dict[str, int]
"""Elements or parameters that are not as they should be, by what is wrong with them."""


class Net(nn.Module):
    """Two layers, and one that forward does not use."""

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
        """Another method that computes with the parameters."""
        out: Tensor = 2 * self.second(self.first(x).relu())
        return out


class _World:
    """A rank's place in it, and what one process computes on the samples of all."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device = fsdp_mesh(mesh), device
        self.size, self.rank = self.mesh.size(), dp_rank(mesh)
        generator = torch.Generator().manual_seed(1)
        shape = (self.size, _SAMPLES, _WIDTH)
        self.samples = torch.randint(-2, 3, shape, generator=generator).float().to(device)

    @property
    def own(self) -> Tensor:
        return self.samples[self.rank]

    def net(self, **options: Any) -> "Net":
        return self.shard(Net().to(self.device), **options)

    def shard(self, net: Net, **options: Any) -> Net:
        """Both layers, and the root with the spare one."""
        for module in (net.first, net.second, net):
            fully_shard(module, mesh=self.mesh, **options)
        return net

    def expected(self, one: Net | None = None) -> dict[str, Tensor | None]:
        """Gradients of the mean over ranks of the summed outputs."""
        one = (one or Net()).to(self.device)
        one(self.samples.flatten(0, 1)).sum().backward()
        return {name: None if p.grad is None else p.grad / self.size for name, p in one.named_parameters()}

    def wrong(self, net: Net, expected: dict[str, Tensor | None] | None = None, *, factor: float = 1.0) -> Found:
        """Gradients of the sharded net beside `factor` times what is expected."""
        found = {}
        for name, wanted in (expected or self.expected()).items():
            grad = net.get_parameter(name).grad
            if grad is None or wanted is None:
                found[f"gradient of {name}"] = 0 if grad is wanted else 1
            else:
                found[f"gradient of {name}"] = int((full(grad) != factor * wanted).sum())
        return found

    def backward(self, net: Net) -> Net:
        net(self.own).sum().backward()
        return net


def use_options(context: RankContext, payload: dict[str, Any]) -> dict[str, Found]:
    """What is wrong, for each option of `fully_shard` and way to train."""
    return _of_world(context, payload, _OPTIONS)


def use_methods(context: RankContext, payload: dict[str, Any]) -> dict[str, Found]:
    """What is wrong, for each method of `FSDPModule`."""
    return _of_world(context, payload, _METHODS)


def _of_world(
    context: RankContext, payload: dict[str, Any], uses: Mapping[str, Callable[[_World], Found]]
) -> dict[str, Found]:
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        device = start_process_group(context)
        world = _World(build_mesh(resolve_mesh(config.mesh, world_size=context.world_size), device), device)
        found = {name: use(world) for name, use in uses.items()}
        destroy_process_group()
    return found


def _sharded_along_the_last_dimension(world: _World) -> Found:
    net = world.net(shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    return world.wrong(world.backward(net))


def _with_a_frozen_parameter(world: _World) -> Found:
    nets = Net().to(world.device), Net()
    for net in nets:
        net.first.weight.requires_grad_(False)
    return world.wrong(world.backward(world.shard(nets[0])), world.expected(nets[1]))


def _with_an_ignored_parameter(world: _World) -> Found:
    """It is neither sharded nor reduced: its gradient is that of the rank's own samples."""
    net = Net().to(world.device)
    world.shard(net, ignored_params={net.second.bias})
    expected = world.expected()
    expected["second.bias"] = torch.full((_WIDTH,), float(_SAMPLES), device=world.device)
    return world.wrong(world.backward(net), expected) | {"sharded": int(isinstance(net.second.bias, DTensor))}


def _evaluated_between_steps(world: _World) -> Found:
    net = world.backward(world.net())
    net.zero_grad()
    with torch.no_grad():
        net(world.own)
    return world.wrong(world.backward(net))


def _changed_through_its_state_dict(world: _World) -> Found:
    net, one = world.net(), Net().to(world.device)
    net(world.own)
    state = net.state_dict()
    found = {f"state of {name}": int((full(state[name]) != value).sum()) for name, value in one.state_dict().items()}
    with torch.no_grad():
        net.load_state_dict({name: value * 2 for name, value in state.items()})
        one.load_state_dict({name: value * 2 for name, value in one.state_dict().items()})
    return found | world.wrong(world.backward(net), world.expected(one))


def _divided_by_a_factor(world: _World) -> Found:
    """Twice the number of ranks. The sum is asked for as gloo has none with a factor of its own."""
    net = world.net()
    for module in _fsdp_modules(net):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(2.0 * world.size)
    return world.wrong(world.backward(net), factor=0.5)


def _with_a_hook_on_reduced_gradients(world: _World) -> Found:
    net = world.net()
    for module in _fsdp_modules(net):
        module.set_all_reduce_hook(_triple)
    return world.wrong(world.backward(net), factor=3.0)


def _triple(reduced: Tensor) -> None:
    reduced.mul_(3)


def _unsharded_ahead(world: _World) -> Found:
    net = world.net()
    handle = cast("FSDPModule", net.first).unshard(async_op=True)
    assert handle is not None
    handle.wait()
    whole = dict(net.first.named_parameters())
    found = {"sharded": _sharded(net.first)}
    one = Net().to(world.device)
    found |= {name: int((full(whole[name]) != value).sum()) for name, value in one.first.named_parameters()}
    found |= world.wrong(world.backward(net))
    cast("FSDPModule", net.first).unshard()
    cast("FSDPModule", net.first).reshard()
    return found | {"unsharded": len(whole) - _sharded(net.first)}


def _kept_after_forward(world: _World) -> Found:
    net = world.net()
    cast("FSDPModule", net).set_reshard_after_forward(False)
    out = net(world.own)
    found = {"sharded": _sharded(net.first)}
    out.sum().backward()
    return found | world.wrong(net) | {"unsharded": 2 - _sharded(net.first)}


def _kept_after_backward(world: _World) -> Found:
    net = world.net()
    cast("FSDPModule", net).set_reshard_after_backward(False)
    world.backward(net)
    found = {"sharded": _sharded(net.first)}
    for module in _fsdp_modules(net):
        module.reshard()
    return found | world.wrong(net)


def _by_another_method(world: _World) -> Found:
    """All parameters are the root's: hooks of the layers' own would unshard them whatever the method."""
    net = Net().to(world.device)
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
    "divided by a factor": _divided_by_a_factor,
    "with a hook on reduced gradients": _with_a_hook_on_reduced_gradients,
    "unsharded ahead": _unsharded_ahead,
    "kept after forward": _kept_after_forward,
    "kept after backward": _kept_after_backward,
    "by another method": _by_another_method,
}


class _Casting(nn.Module):
    """Tells the dtypes of what it is given, alone and inside of other things, and returns some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor, *, table: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"argument": x, "keyword": table, "inside": others["float"], "integer": others["integer"]}
        self.seen = {name: _name(tensor.dtype) for name, tensor in given.items()}
        return self.layer(x), {"table": table, "integer": others["integer"]}


def cast_what_is_given(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Dtypes of what a module of `param_dtype` bf16 sees, returns and gives gradients of; for each policy.

    A policy is `CAST/OUTPUT`: whether inputs are cast, and the output's dtype (`None`: as computed). Without a cast the
    module is given bf16 as argument, which its layer needs; all else is fp32.
    """
    config = rank_config(context, payload)
    found = {}
    with injected(payload["defect"]):
        device = start_process_group(context)
        mesh = build_mesh(resolve_mesh(config.mesh, world_size=context.world_size), device)
        for casts, output in product((True, False), (None, torch.float32, torch.bfloat16)):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output, cast_forward_inputs=casts)
            net = _Casting().to(device)
            fully_shard(net, mesh=fsdp_mesh(mesh), mp_policy=policy)
            found[f"{casts}/{_name(output)}"] = _dtypes(net, device, torch.float32 if casts else torch.bfloat16)
        destroy_process_group()
    return found


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
