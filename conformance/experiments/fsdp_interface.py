"""Options of `fully_shard`, methods of `FSDPModule`, and ways of training, that the reference trainer does not use."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp  # for `share_comm_ctx`, which torch has from 2.10 on
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.fsdp_extension import TwoDtypeTensor
from conformance.experiments.fsdp_net import (
    INNER,
    SAMPLES,
    WIDTH,
    DataParallel,
    Net,
    Wrong,
    fsdp_modules,
    sharded_parameters,
    try_all,
)
from conformance.instruments.sharding import full, local
from conformance.run.experiment import Needs


@experiment(needs=Needs.TRAINING, takes_share=True)
def use_options(rank: RankWorld) -> dict[str, Wrong]:
    """Try options of `fully_shard`, and ways of training; rare ones where the profile does not take a share."""
    is_tried = rank.sweep_share == 1.0 and hasattr(fsdp, "DataParallelMeshDims")
    return try_all(rank, {**_OPTIONS, **(_RARE_OPTIONS if is_tried else {})})


def _sharded_along_the_last_dimension(world: DataParallel) -> Wrong:
    net = world.net(shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    return world.wrong(world.backward(net))


def _with_sums_of_full_length(world: DataParallel) -> Wrong:
    """Reduce gradients whose last bits count: positive integers whose sums are just below 2^24.

    Of weights up to 2, a sum over 8 or 16 elements, 4 samples and all ranks is at most 128 times the largest sample and
    the number of ranks. Computed in fp32, whatever the policy; over shards alone and over replicas alone as well.
    """
    largest = 2**24 // (2 * INNER * SAMPLES * world.size) - WIDTH
    generator = torch.Generator().manual_seed(2)
    samples = torch.randint(largest // 2, largest, world.samples.shape, generator=generator).float()
    wrong: Wrong = {}
    for name, mesh in world.meshes().items():
        exact = DataParallel(mesh.mesh, world.device, world.rank, MixedPrecisionPolicy())
        exact.samples = samples.to(world.device)
        nets = Net().to(world.device), Net()
        for parameter in (*nets[0].parameters(), *nets[1].parameters()):
            parameter.data.abs_()
        found = exact.wrong(exact.backward(exact.shard(nets[0])), exact.expected(nets[1]))
        wrong |= {f"{name} mesh, {what}": n for what, n in found.items()}
    return wrong


def _with_a_frozen_parameter(world: DataParallel) -> Wrong:
    nets = Net().to(world.device), Net()
    for net in nets:
        net.first.weight.requires_grad_(False)
    return world.wrong(world.backward(world.shard(nets[0])), world.expected(nets[1]))


def _with_an_ignored_parameter(world: DataParallel) -> Wrong:
    """Ignore a parameter: it is neither sharded, cast nor reduced; its gradient is that of the rank's own samples."""
    net = Net().to(world.device)
    net.second.bias.data = net.second.bias.data.to(world.policy.param_dtype or torch.float32)
    world.shard(net, ignored_params={net.second.bias})
    expected = world.expected()
    expected["second.bias"] = torch.full((WIDTH,), float(SAMPLES), device=world.device)
    return world.wrong(world.backward(net), expected) | {"sharded": int(isinstance(net.second.bias, DTensor))}


def _evaluated_between_steps(world: DataParallel) -> Wrong:
    net = world.backward(world.net())
    net.zero_grad()
    with torch.no_grad():
        net(world.own)
    return world.wrong(world.backward(net))


def _changed_through_its_state_dict(world: DataParallel) -> Wrong:
    net, single = world.net(), Net().to(world.device)
    net(world.own)
    state = net.state_dict()
    wrong = {f"state of {name}": int((full(state[name]) != value).sum()) for name, value in single.state_dict().items()}
    with torch.no_grad():
        net.load_state_dict({name: value * 2 for name, value in state.items()})
        single.load_state_dict({name: value * 2 for name, value in single.state_dict().items()})
    return wrong | world.wrong(world.backward(net), world.expected(single))


def _with_postponed_reductions(world: DataParallel) -> Wrong:
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


def _copy(grad: Tensor | None) -> Tensor:
    """Return a copy of this rank's shard of a gradient, empty for none."""
    return torch.empty(0) if grad is None else local(grad).clone()


def _two_modules_in_one_group(world: DataParallel) -> Wrong:
    """Shard two layers together: their parameters are resharded together, after the last of them."""
    net = Net().to(world.device)
    fully_shard([net.first, net.second], mesh=world.mesh, mp_policy=world.policy)
    fully_shard(net, mesh=world.mesh, mp_policy=world.policy)
    sharded: list[int] = []
    for layer in (net.first, net.second):
        layer.register_forward_hook(lambda *_: sharded.append(sharded_parameters(net.first)))
    wrong = world.wrong(world.backward(net))
    return wrong | {f"parameters of the first layer sharded after each layer: {sharded}": int(sharded != [0, 2])}


def _two_roots_with_shared_streams(world: DataParallel) -> Wrong:
    """Shard two layers of a module that is not sharded itself, whose parameter has the gradient of own samples."""
    net = Net().to(world.device)
    for module in (net.first, net.second):
        fully_shard(module, mesh=world.mesh, mp_policy=world.policy)
    fsdp.share_comm_ctx([])
    fsdp.share_comm_ctx([cast("FSDPModule", net.first), cast("FSDPModule", net.second)])
    expected = world.expected()
    expected["shift"] = torch.full((1,), float(SAMPLES * WIDTH), device=world.device)
    return world.wrong(world.backward(net), expected)


def _wrong_in_two_passes(world: DataParallel, net: Net) -> Wrong:
    """Compare the gradients after a backward pass, and after a second one."""
    wrong: Wrong = {}
    for index in range(2):
        expected = world.expected(micro_batches=index + 1)
        found = world.wrong(world.backward(net, micro_batch=index), expected)
        wrong |= {f"backward pass {index}, {what}": n for what, n in found.items()}
    return wrong


def _one_module_of_a_group_unused(world: DataParallel) -> Wrong:
    """Shard two layers together of which forward runs one: the root completes the group, for backward, too."""
    net = Net().to(world.device)
    fully_shard([net.first, net.spare], mesh=world.mesh, mp_policy=world.policy)
    for module in (net.second, net):
        fully_shard(module, mesh=world.mesh, mp_policy=world.policy)
    return _wrong_in_two_passes(world, net)


def _kept_over_one_rank(world: DataParallel) -> Wrong:
    net = world.net(reshard_after_forward=1)
    out = net(world.own)
    wrong = {"sharded after forward": sharded_parameters(net.first)}
    out.sum().backward()
    return wrong | world.wrong(net)


def _slice_of_a_sequential(world: DataParallel) -> Wrong:
    """Index a Sequential: the slice is a plain one, of the same layers."""
    net = Net().to(world.device)
    layers = nn.Sequential(net.first, nn.ReLU(), net.second)
    fully_shard(layers, mesh=world.mesh, mp_policy=world.policy)
    first: Any = layers[:1]
    return {"type": int(type(first) is not nn.Sequential), "layers": int(first[0] is not net.first)}


def _gathered_by_an_extension(world: DataParallel) -> Wrong:
    """Shard weights that say themselves how they are gathered, beside biases that do not.

    Not on one rank, see findings/second_gathered_tensor_lost_on_one_rank.py.
    """
    if world.size == 1:
        return {}
    net = Net().to(world.device)
    for layer in (net.first, net.second):
        layer.weight = nn.Parameter(TwoDtypeTensor(layer.weight.detach()))
    world.shard(net)
    return _wrong_in_two_passes(world, net)


def _with_hooks_on_accumulated_gradients(world: DataParallel) -> Wrong:
    """Call each parameter's hook once for each backward pass, when its gradient is there: optimizers step in it."""
    net = world.net()
    used = {name: parameter for name, parameter in net.named_parameters() if not name.startswith("spare")}
    seen: dict[str, list[Tensor]] = {name: [] for name in used}
    for name, parameter in used.items():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter, seen=seen[name]: seen.append(_copy(parameter.grad))
        )
    wrong = {}
    for index in range(2):
        world.backward(net, micro_batch=index)
        for name, parameter in used.items():
            called_once = len(seen[name]) == index + 1
            is_right = called_once and torch.equal(seen[name][-1], _copy(parameter.grad))
            wrong[f"hook of {name} in backward pass {index}"] = int(not is_right)
    return wrong | world.wrong(net, world.expected(micro_batches=2))


_OPTIONS = {
    "reduce_dtype=float32": _with_sums_of_full_length,
    "shard_placement_fn": _sharded_along_the_last_dimension,
    "requires_grad_(False)": _with_a_frozen_parameter,
    "ignored_params": _with_an_ignored_parameter,
    "no_grad between steps": _evaluated_between_steps,
    "set_requires_gradient_sync": _with_postponed_reductions,
    "load_state_dict": _changed_through_its_state_dict,
    "register_post_accumulate_grad_hook": _with_hooks_on_accumulated_gradients,
    "fully_shard of two modules": _two_modules_in_one_group,
    "share_comm_ctx": _two_roots_with_shared_streams,
}
_RARE_OPTIONS = {
    "fully_shard of two modules, one unused": _one_module_of_a_group_unused,
    "reshard_after_forward=1": _kept_over_one_rank,
    "slice of a Sequential": _slice_of_a_sequential,
    "fsdp_pre_all_gather": _gathered_by_an_extension,
}
"""Options that torch has from 2.13 on, as it has `DataParallelMeshDims`."""


@experiment(needs=Needs.TRAINING)
def use_methods(rank: RankWorld) -> dict[str, Wrong]:
    """Try the methods of `FSDPModule` that the installed torch has."""
    missing = tuple(name for name in _NEWER_METHODS if not hasattr(FSDPModule, name))
    return try_all(rank, {name: use for name, use in _METHODS.items() if not name.startswith(missing)})


def _fsdp(module: nn.Module) -> FSDPModule:
    """Return the module as an FSDPModule, which `fully_shard` has made of it."""
    return cast("FSDPModule", module)


def _with_a_divide_factor(world: DataParallel) -> Wrong:
    """Divide by each factor that the mesh allows, offloaded or not, and on meshes of one shard and of one replica."""
    wrong: Wrong = {}
    policies = {"": OffloadPolicy(), ", offloaded": CPUOffloadPolicy(pin_memory=world.device.type != "cpu")}
    tried = {
        f"{name}{text}": (other, policy) for name, other in world.meshes().items() for text, policy in policies.items()
    }
    for name, (other, policy) in tried.items():
        for factor, forced in _divide_factors(other):
            net = other.net(offload_policy=policy)
            for module in fsdp_modules(net):
                module.set_force_sum_reduction_for_comms(forced)
                module.set_gradient_divide_factor(factor)
            found = other.wrong(other.backward(net), factor=other.size / factor)
            wrong |= {f"{name} mesh, factor {factor}, forced sum {forced}, {what}": n for what, n in found.items()}
    return wrong


def _divide_factors(world: DataParallel) -> list[tuple[float, bool]]:
    """Return factors, and whether reductions are forced to SUM.

    Without force gloo, which has no reduction that multiplies, can divide by the number of shards alone, but by
    anything where there is one shard. Torch 2.13 divides twice if there is one shard and sums are forced, or fp16 is
    reduced: not tried (findings/divide_factor_of_one_shard.py).
    """
    if world.shards == 1:
        is_known_fault = world.policy.reduce_dtype == torch.float16
        return [] if is_known_fault else [(2.0 * world.size, False), (float(world.size), False)]
    return [(2.0 * world.size, True), (float(world.shards), True), (float(world.shards), False)]


def _with_a_hook_on_reduced_gradients(world: DataParallel) -> Wrong:
    net = world.net()
    for module in fsdp_modules(net):
        module.set_all_reduce_hook(_triple)
    return world.wrong(world.backward(net), factor=3.0)


def _triple(reduced: Tensor) -> None:
    reduced.mul_(3)


def _unsharded_ahead(world: DataParallel) -> Wrong:
    net = world.net()
    handle = _fsdp(net.first).unshard(async_op=True)
    assert handle is not None
    handle.wait()
    unsharded = dict(net.first.named_parameters())
    wrong = {"sharded": sharded_parameters(net.first)}
    single = Net().to(world.device)
    for name, value in single.first.named_parameters():
        wrong[name] = int((full(unsharded[name]) != value).sum())
    wrong |= world.wrong(world.backward(net))
    _fsdp(net.first).unshard()
    _fsdp(net.first).reshard()
    return wrong | {"unsharded": len(unsharded) - sharded_parameters(net.first)}


def _kept_after_forward(world: DataParallel) -> Wrong:
    net = world.net()
    _fsdp(net).set_reshard_after_forward(False)
    out = net(world.own)
    wrong = {"sharded": sharded_parameters(net.first)}
    out.sum().backward()
    return wrong | world.wrong(net) | {"unsharded": 2 - sharded_parameters(net.first)}


def _resharded_after_forward(world: DataParallel) -> Wrong:
    """Reshard the root as well, which `fully_shard` leaves unsharded by default."""
    net = world.net()
    _fsdp(net).set_reshard_after_forward(True)
    out = net(world.own)
    wrong = {"unsharded": sum(1 for _ in net.parameters()) - sharded_parameters(net)}
    out.sum().backward()
    return wrong | world.wrong(net)


def _kept_after_backward(world: DataParallel) -> Wrong:
    net = world.net()
    _fsdp(net).set_reshard_after_backward(False)
    world.backward(net)
    wrong = {"sharded": sharded_parameters(net.first)}
    for module in fsdp_modules(net):
        module.reshard()
    return wrong | world.wrong(net)


def _by_another_method(world: DataParallel) -> Wrong:
    """Compute in another method than forward; one group, since hooks of the layers would unshard in any method."""
    net = Net().to(world.device)
    fully_shard(net, mesh=world.mesh, mp_policy=world.policy)
    register_fsdp_forward_method(net, "doubled")
    register_fsdp_forward_method(net.first, "forward")  # without effect on a module that is not sharded itself
    torch.autograd.backward(net.doubled(world.own).sum())
    return world.wrong(net, factor=2.0)


def _without_recursion(world: DataParallel) -> Wrong:
    """Change the root alone: layers go on as before, for each setter that has `recurse`."""
    without_root = world.expected() | {"shift": None}
    replicated = without_root if world.shards < world.size else world.expected()
    reductions = _postponed_by_the_root(world, "reductions", FSDPModule.set_requires_gradient_sync, without_root)
    sums = _postponed_by_the_root(world, "all-reduces", FSDPModule.set_requires_all_reduce, replicated)
    return reductions | sums | _kept_by_the_root(world)


def _postponed_by_the_root(
    world: DataParallel, name: str, synchronise: Callable[..., None], first: dict[str, Tensor | None]
) -> Wrong:
    """Switch a synchronisation of the root off for a micro-batch, which must leave the gradients `first`."""
    net = world.net()
    synchronise(_fsdp(net), False, recurse=False)
    wrong = {f"{name}, {what}": n for what, n in world.wrong(world.backward(net), first).items()}
    synchronise(_fsdp(net), True, recurse=False)
    found = world.wrong(world.backward(net, micro_batch=1), world.expected(micro_batches=2))
    return wrong | {f"{name}, at last, {what}": n for what, n in found.items()}


def _kept_by_the_root(world: DataParallel) -> Wrong:
    net = world.net()
    _fsdp(net).set_reshard_after_forward(False, recurse=False)
    _fsdp(net).set_reshard_after_backward(False, recurse=False)
    out = net(world.own)
    wrong = _kept_but_by_layers(net, "forward")
    out.sum().backward()
    wrong |= _kept_but_by_layers(net, "backward")
    _fsdp(net).reshard()
    return wrong | world.wrong(net)


def _kept_but_by_layers(net: Net, phase: str) -> Wrong:
    layers = sharded_parameters(net.first) + sharded_parameters(net.second)
    return {f"layers kept after {phase}": 4 - layers, f"root resharded after {phase}": sharded_parameters(net) - layers}


def _with_unused_parameters_reduced(world: DataParallel) -> Wrong:
    """Use the spare layer on the first rank alone: without the method, ranks reduce gradients of unequal sizes."""
    net = world.net()
    _fsdp(net).set_reduce_scatter_unused_params(True)
    net(world.own, with_spare=world.rank == 0).sum().backward()
    single = Net().to(world.device)
    single.spare(world.samples[0]).sum().backward()
    return world.wrong(net, world.expected(single))


def _before_the_last_backward(world: DataParallel) -> Wrong:
    net = world.net()
    _fsdp(net).set_is_last_backward(False)
    world.backward(net)
    _fsdp(net).set_is_last_backward(True)
    return world.wrong(world.backward(net, micro_batch=1), world.expected(micro_batches=2))


class _Stopped(Exception):
    """Exception that a hook raises in the middle of an iteration."""


def _stop(*_: Any) -> None:
    raise _Stopped


def _stop_backward(_: nn.Module, __: Any, out: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook((out,), _stop)


def _stopped_in_forward_and_reset(world: DataParallel) -> Wrong:
    return _stopped_and_reset(world, lambda net: net.second.register_forward_pre_hook(_stop))


def _stopped_in_backward_and_reset(world: DataParallel) -> Wrong:
    """Stop between the two layers, when the root has a gradient that is not reduced."""
    return _stopped_and_reset(world, lambda net: net.first.register_forward_hook(_stop_backward))


def _stopped_and_reset(world: DataParallel, stop: Callable[[Net], RemovableHandle]) -> Wrong:
    """Stop on all ranks, then reset; training after that is right."""
    net = world.net()
    handle = stop(net)
    with suppress(_Stopped):
        world.backward(net)
        return {"not stopped": 1}
    handle.remove()
    return _wrong_after_reset(world, net)


def _reset_between_micro_batches(world: DataParallel) -> Wrong:
    """Reset after a micro-batch whose reduction was postponed: its gradients must be dropped."""
    net = world.net()
    _fsdp(net).set_requires_gradient_sync(False)
    world.backward(net)
    _fsdp(net).set_requires_gradient_sync(True)
    return _wrong_after_reset(world, net)


def _wrong_after_reset(world: DataParallel, net: Net) -> Wrong:
    _fsdp(net).reset_iter_state()
    net.zero_grad()
    wrong = {"unsharded": sum(1 for _ in net.parameters()) - sharded_parameters(net)}
    return wrong | world.wrong(world.backward(net))


class _AllGather:
    """Custom all-gather that records its process groups; the interface is that of `set_custom_all_gather`."""

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the inputs of all ranks of the group."""
        self.groups.append(group)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(_AllGather):
    """Custom reduce-scatter that counts earlier inputs still alive when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self._inputs: list[weakref.ref[Tensor]] = []

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce the inputs of all ranks of the group, and scatter the result."""
        self.groups.append(group)
        self.held.append(sum(earlier() is not None for earlier in self._inputs))
        self._inputs.append(weakref.ref(input_tensor))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _use_collectives(net: Net) -> tuple[_AllGather, _ReduceScatter]:
    gather, reduce = _AllGather(), _ReduceScatter()
    for module in fsdp_modules(net):
        module.set_custom_all_gather(cast("Any", gather))
        module.set_custom_reduce_scatter(cast("Any", reduce))
    return gather, reduce


def _with_custom_collectives(world: DataParallel) -> Wrong:
    """Let custom collectives gather two layers twice and the root once, and reduce each of the three once.

    Both get one group, and by default no input lives until the next reduction.
    """
    net = world.net()
    gather, reduce = _use_collectives(net)
    return world.wrong(world.backward(net)) | {
        "gathers": abs(len(gather.groups) - 5),
        "reductions": abs(len(reduce.groups) - 3),
        "groups": len({*gather.groups, *reduce.groups}) - 1,
        "inputs held": sum(reduce.held),
    }


def _with_more_input_buffers(world: DataParallel) -> Wrong:
    """Hold up to two inputs of reductions: from the second reduction on one earlier input."""
    net = world.net()
    _, reduce = _use_collectives(net)
    _fsdp(net).set_reduce_scatter_max_input_buffers(2)
    return world.wrong(world.backward(net)) | {"inputs held": int(reduce.held != [0, 1, 1])}


def _with_a_group_for_reductions(world: DataParallel) -> Wrong:
    net = world.net()
    gather, reduce = _use_collectives(net)
    _fsdp(net).set_separate_reduce_scatter_group()
    wrong = world.wrong(world.backward(net))
    return wrong | {"groups in common": len({*gather.groups} & {*reduce.groups}), "groups": len({*reduce.groups}) - 1}


def _sharded_in_backward(world: DataParallel) -> Wrong:
    """Leave the first layer sharded in backward, which needs its input alone; the second one has to be gathered."""
    net = world.net()
    _fsdp(net.first).set_unshard_in_backward(False)
    wrong: Wrong = {"unsharded": 2}  # until the hook counts

    def see(module: nn.Module, _: Any, out: Tensor) -> None:
        torch.autograd.graph.register_multi_grad_hook(
            (out,), lambda _: wrong.update({"unsharded": 2 - sharded_parameters(module)})
        )

    net.first.register_forward_hook(see)
    return world.wrong(world.backward(net)) | wrong


_METHODS = {
    "set_gradient_divide_factor": _with_a_divide_factor,
    "set_all_reduce_hook": _with_a_hook_on_reduced_gradients,
    "unshard(async_op=True)": _unsharded_ahead,
    "set_reshard_after_forward(False)": _kept_after_forward,
    "set_reshard_after_forward(True)": _resharded_after_forward,
    "set_reshard_after_backward(False)": _kept_after_backward,
    "register_fsdp_forward_method": _by_another_method,
    "set_requires_gradient_sync(recurse=False)": _without_recursion,
    "set_reduce_scatter_unused_params": _with_unused_parameters_reduced,
    "set_is_last_backward(False)": _before_the_last_backward,
    "reset_iter_state() in forward": _stopped_in_forward_and_reset,
    "reset_iter_state() in backward": _stopped_in_backward_and_reset,
    "reset_iter_state() between micro-batches": _reset_between_micro_batches,
    "set_custom_reduce_scatter": _with_custom_collectives,
    "set_reduce_scatter_max_input_buffers": _with_more_input_buffers,
    "set_separate_reduce_scatter_group": _with_a_group_for_reductions,
    "set_unshard_in_backward(False)": _sharded_in_backward,
}
_NEWER_METHODS = (
    "set_reduce_scatter_unused_params",
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
)
"""Methods that torch has from 2.13 on."""
