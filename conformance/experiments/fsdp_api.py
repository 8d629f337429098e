"""FSDP2 API that the reference trainer does not use, tried with a small net.

Weights and inputs are small integers and the number of ranks is a power of two, so that sums and means are exact in
fp32 in any order: a gradient equals that of one process in every bit, or it is wrong. In bf16 and fp16 products are
exact, too: bf16 has all integers up to 256, and sums over ranks are in fp32 or fp16, which has those up to 2048.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from reference_trainer.mesh import dp_rank, fsdp_mesh
from reference_trainer.mixed_precision import mixed_precision_policy

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


class _Net(nn.Module):
    """Net of two layers and a parameter of one element, and a third layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)
        self.spare = nn.Linear(_WIDTH, _WIDTH)
        self.shift = nn.Parameter(torch.zeros(1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu()) + self.shift
        return out

    def doubled(self, x: Tensor) -> Tensor:
        """Compute with the parameters in a method that is not `forward`."""
        out: Tensor = 2 * (self.second(self.first(x).relu()) + self.shift)
        return out


class _DataParallel:
    """Coordinate and samples of a rank, and the results of one process on the samples of all ranks."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, rank: int, policy: MixedPrecisionPolicy) -> None:
        self.mesh, self.device, self.rank, self.policy = mesh, device, rank, policy
        self.size, self.shards = mesh.size(), mesh.size(mesh.ndim - 1)
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
            fully_shard(module, mesh=self.mesh, mp_policy=self.policy, **options)
        return net

    def expected(self, single: _Net | None = None, *, micro_batches: int = 1) -> dict[str, Tensor | None]:
        """Return the gradients of the mean over ranks of the summed outputs, computed by one process."""
        single = (single or _Net()).to(self.device)
        for index in range(micro_batches):
            single(self.samples.flatten(0, 1) + index).sum().backward()
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

    def backward(self, net: _Net, *, micro_batch: int = 0) -> _Net:
        net(self.own + micro_batch).sum().backward()
        return net

    def meshes(self) -> dict[str, "_DataParallel"]:
        """Return this, and the same ranks as replicas of one shard and as shards of one replica, by name."""
        return {"own": self, "N x 1": self._on(self.size, 1), "1 x N": self._on(1, self.size)}

    def _on(self, *shape: int) -> "_DataParallel":
        return _DataParallel(
            init_device_mesh(self.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")),
            self.device,
            self.rank,
            self.policy,
        )


def _try_all(rank: RankWorld, uses: Mapping[str, Callable[[_DataParallel], Wrong]]) -> dict[str, Wrong]:
    policy = replace(mixed_precision_policy(rank.config.precision), cast_forward_inputs=True)
    world = _DataParallel(fsdp_mesh(rank.mesh), rank.device, dp_rank(rank.mesh), policy)
    return {name: use(world) for name, use in uses.items()}


def _sharded_along_the_last_dimension(world: _DataParallel) -> Wrong:
    net = world.net(shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    return world.wrong(world.backward(net))


def _with_sums_of_full_length(world: _DataParallel) -> Wrong:
    """Reduce gradients whose last bits count: positive integers whose sums are just below 2^24.

    Of weights up to 2, a sum over 8 or 16 elements, 4 samples and all ranks is at most 128 times the largest sample and
    the number of ranks. Computed in fp32, whatever the policy; over shards alone and over replicas alone as well.
    """
    largest = 2**24 // (2 * _INNER * _SAMPLES * world.size) - _WIDTH
    generator = torch.Generator().manual_seed(2)
    samples = torch.randint(largest // 2, largest, world.samples.shape, generator=generator).float()
    wrong: Wrong = {}
    for name, mesh in world.meshes().items():
        exact = _DataParallel(mesh.mesh, world.device, world.rank, MixedPrecisionPolicy())
        exact.samples = samples.to(world.device)
        nets = _Net().to(world.device), _Net()
        for parameter in (*nets[0].parameters(), *nets[1].parameters()):
            parameter.data.abs_()
        found = exact.wrong(exact.backward(exact.shard(nets[0])), exact.expected(nets[1]))
        wrong |= {f"{name} mesh, {what}": n for what, n in found.items()}
    return wrong


def _with_a_frozen_parameter(world: _DataParallel) -> Wrong:
    nets = _Net().to(world.device), _Net()
    for net in nets:
        net.first.weight.requires_grad_(False)
    return world.wrong(world.backward(world.shard(nets[0])), world.expected(nets[1]))


def _with_an_ignored_parameter(world: _DataParallel) -> Wrong:
    """Ignore a parameter: it is neither sharded, cast nor reduced; its gradient is that of the rank's own samples."""
    net = _Net().to(world.device)
    net.second.bias.data = net.second.bias.data.to(world.policy.param_dtype or torch.float32)
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


def _with_postponed_reductions(world: _DataParallel) -> Wrong:
    """Reduce nothing in the first of three micro-batches and within shards alone in the second, in any placement.

    After forward groups are resharded in full or, where there are shards enough, over two ranks. Along another than the
    first dimension torch 2.13 can not: its backward raises IndexError.
    """
    wrong: Wrong = {}
    expected = world.expected(micro_batches=3)
    for reshard, last in ((True, True), (2 if world.shards > 2 else True, False)):
        net = world.net(
            shard_placement_fn=lambda parameter, last=last: Shard(parameter.ndim - 1 if last else 0),
            reshard_after_forward=reshard,
        )
        for index in range(3):
            net_fsdp = cast("FSDPModule", net)
            net_fsdp.set_requires_gradient_sync(index > 0)
            net_fsdp.set_reshard_after_backward(index > 0)
            net_fsdp.set_requires_all_reduce(index > 1)
            world.backward(net, micro_batch=index)
        found = world.wrong(net, expected)
        wrong |= {f"reshard {reshard}, {'last' if last else 'first'} dimension, {what}": n for what, n in found.items()}
    return wrong


def _with_a_divide_factor(world: _DataParallel) -> Wrong:
    """Divide by each factor that the mesh allows, and on meshes of one shard and of one replica as well."""
    wrong: Wrong = {}
    for name, other in world.meshes().items():
        for factor, forced in _divide_factors(other):
            net = other.net()
            for module in _fsdp_modules(net):
                module.set_force_sum_reduction_for_comms(forced)
                module.set_gradient_divide_factor(factor)
            found = other.wrong(other.backward(net), factor=other.size / factor)
            wrong |= {f"{name} mesh, factor {factor}, forced sum {forced}, {what}": n for what, n in found.items()}
    return wrong


def _divide_factors(world: _DataParallel) -> list[tuple[float, bool]]:
    """Return factors, and whether reductions are forced to SUM.

    Without force gloo, which has no reduction that multiplies, can divide by the number of shards alone, but by
    anything where there is one shard. Torch 2.13 divides twice if there is one shard and sums are forced, or fp16 is
    reduced: not tried (findings/divide_factor_of_one_shard.py).
    """
    if world.shards == 1:
        is_known_fault = world.policy.reduce_dtype == torch.float16
        return [] if is_known_fault else [(2.0 * world.size, False), (float(world.size), False)]
    return [(2.0 * world.size, True), (float(world.shards), True), (float(world.shards), False)]


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
    fully_shard(net, mesh=world.mesh, mp_policy=world.policy)
    register_fsdp_forward_method(net, "doubled")
    torch.autograd.backward(net.doubled(world.own).sum())
    return world.wrong(net, factor=2.0)


def _fsdp_modules(net: nn.Module) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def _sharded(module: nn.Module) -> int:
    return sum(isinstance(parameter, DTensor) for parameter in module.parameters())


_OPTIONS = {
    "with sums of full length": _with_sums_of_full_length,
    "sharded along the last dimension": _sharded_along_the_last_dimension,
    "with a frozen parameter": _with_a_frozen_parameter,
    "with an ignored parameter": _with_an_ignored_parameter,
    "evaluated between steps": _evaluated_between_steps,
    "with postponed reductions": _with_postponed_reductions,
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
