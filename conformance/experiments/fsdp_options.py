"""Options of `fully_shard`, and ways of training, that the reference trainer does not use."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp  # for `share_comm_ctx`, which torch has from 2.10 on
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.fsdp_dimensions import name_dimensions
from conformance.experiments.fsdp_extension import TwoDtypeTensor, placed_on
from conformance.experiments.fsdp_net import (
    INNER,
    SAMPLES,
    WIDTH,
    DataParallel,
    Net,
    Wrong,
    double,
    fsdp_module,
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
    """Shard weights that say themselves how they are gathered, beside biases that do not; offloaded or not.

    Not on one rank, see findings/second_gathered_tensor_lost_on_one_rank.py.
    """
    if world.size == 1:
        return {}
    wrong: Wrong = {}
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=world.device.type != "cpu")):
        net = Net().to(world.device)
        for layer in (net.first, net.second):
            layer.weight = nn.Parameter(TwoDtypeTensor(layer.weight.detach()))
        found = _wrong_in_two_passes(world, world.shard(net, offload_policy=policy))
        wrong |= {f"{type(policy).__name__}, {what}": n for what, n in found.items()}
    return wrong


def _with_an_ignored_module(world: DataParallel) -> Wrong:
    """Ignore all parameters of a module that has submodules, one of them twice, of which one has a buffer."""
    net = Net().to(world.device)
    plain = nn.Linear(WIDTH, WIDTH, bias=False, device=world.device)
    with_buffer, steps = nn.Sequential(), torch.ones(1, device=world.device)
    with_buffer.register_buffer("steps", steps)
    net.add_module("ignored", nn.Sequential(nn.Sequential(plain), plain, with_buffer))
    world.shard(net, ignored_params={plain.weight})
    wrong = {
        "sharded": int(isinstance(plain.weight, DTensor)),
        "buffer": int(with_buffer.get_buffer("steps") is not steps),
    }
    return wrong | world.wrong(world.backward(net))


class _Watched(nn.Linear):
    """Layer that notes the names of attributes that are set on it."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("set", set()).add(name)
        super().__setattr__(name, value)


def _with_a_module_that_watches(world: DataParallel) -> Wrong:
    """Shard a layer that overrides `__setattr__`, through which all changes of its parameters have to go."""
    net = Net().to(world.device)
    watched = _Watched(WIDTH, INNER, device=world.device)
    watched.load_state_dict(net.first.state_dict())
    net.first = watched
    world.shard(net)
    cast("set[str]", watched.set).clear()
    wrong = world.wrong(world.backward(net))
    return wrong | {"not watched": len({"weight", "bias"} - cast("set[str]", watched.set))}


def _with_a_shared_module(world: DataParallel) -> Wrong:
    """Shard a module that has one of its layers under two names, and one buffer beside its own."""
    net = Net().to(world.device)
    net.add_module("again", net.spare)
    steps = torch.ones(1, device=world.device)
    for module in (net.spare, net):
        module.register_buffer("steps", steps)
    world.shard(net)
    net(world.own, with_spare=True).sum().backward()
    single = Net().to(world.device)
    single.spare(world.samples.flatten(0, 1)).sum().backward()
    wrong = {"layers": int(net.get_submodule("again") is not net.spare)}
    return wrong | world.wrong(net, world.expected(single))


def _in_inference_mode(world: DataParallel) -> Wrong:
    """Evaluate in inference mode between two steps."""
    net = world.backward(world.net())
    net.zero_grad()
    return _wrong_outputs_of_inference(world, net) | world.wrong(world.backward(net))


def _in_inference_mode_before_the_first_step(world: DataParallel) -> Wrong:
    """Evaluate in inference mode, and then train; an error counts one."""
    net = world.net()
    try:
        wrong = _wrong_outputs_of_inference(world, net)
        world.backward(net)
    except RuntimeError:
        return {"refused": 1}
    return wrong | world.wrong(net)


def _wrong_outputs_of_inference(world: DataParallel, net: Net) -> Wrong:
    plain = Net().to(world.device, world.policy.param_dtype)
    with torch.inference_mode():
        expected = plain(world.own.to(world.policy.param_dtype))
        return {"outputs": int((net(world.own) != expected).sum())}


class _Chunked(nn.Module):
    """Net whose last layer is called for one chunk of samples after the other, each with its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.middle, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER), nn.Linear(INNER, WIDTH)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor) -> Tensor:
        """Compute all but the last layer."""
        out: Tensor = self.middle(self.trunk(x).relu())
        return out

    def backward(self, x: Tensor) -> None:
        """Compute gradients of the summed outputs for samples, of which each chunk has two."""
        out = self(x)
        leaf = out.detach().requires_grad_()
        for chunk in leaf.split(2):
            self.head(chunk).sum().backward()
        out.backward(leaf.grad)


def _in_chunks(world: DataParallel) -> Wrong:
    """Call one layer of a group that has two, for chunks of samples; in fp32 under any policy."""
    nets = _Chunked().to(world.device), _Chunked().to(world.device)
    fully_shard(nets[0].trunk, mesh=world.mesh)
    fully_shard([nets[0].middle, nets[0].head], mesh=world.mesh)
    fully_shard(nets[0], mesh=world.mesh)
    nets[0].backward(world.own)
    nets[1].backward(world.samples.flatten(0, 1))
    wrong: Wrong = {}
    for (name, measured), single in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert measured.grad is not None
        assert single.grad is not None
        wrong[f"gradient of {name}"] = int((full(measured.grad) != single.grad / world.size).sum())
    return wrong


def _on_two_meshes(world: DataParallel) -> Wrong:
    """Give the weights of both layers another mesh of all ranks than the biases."""
    net = Net().to(world.device)
    own = DeviceMesh.from_group(dist.new_group(), world.device.type)
    for module in (net.first, net.second):
        fully_shard(
            module,
            mesh=world.mesh,
            mp_policy=world.policy,
            shard_placement_fn=lambda p: placed_on(own, 0) if p.ndim > 1 else None,
        )
    fully_shard(net, mesh=world.mesh, mp_policy=world.policy)
    return _wrong_in_two_passes(world, net)


def _with_an_unused_prefetch(world: DataParallel) -> Wrong:
    """Prefetch in backward a layer that forward has not used: after a step it is gathered again."""
    nets = Net().to(world.device), Net().to(world.device)
    fully_shard(nets[0].spare, mesh=world.mesh, mp_policy=world.policy)
    world.shard(nets[0])
    fsdp_module(nets[0].second).set_modules_to_backward_prefetch([fsdp_module(nets[0].spare)])
    wrong = {f"unused, {what}": n for what, n in world.wrong(world.backward(nets[0])).items()}
    for net in nets:
        double(net)
    out: list[Tensor] = []
    nets[0].spare.register_forward_hook(lambda _module, _inputs, output: out.append(output.detach().float()))
    nets[0](world.own, with_spare=True).sum().backward()
    wrong["outputs"] = int((out[0] != nets[1].spare(world.own)).sum())
    nets[1].spare(world.samples.flatten(0, 1)).sum().backward()
    return wrong | world.wrong(nets[0], world.expected(nets[1]))


def _with_named_dimensions(world: DataParallel) -> Wrong:
    """Name the dimensions of a mesh, for which there is more than one way from four ranks on, in fp64 alone."""
    is_tried = world.size >= 4 and world.policy.param_dtype is None
    return name_dimensions(world, are_apart=False) if is_tried else {}


def _with_named_dimensions_apart(world: DataParallel) -> Wrong:
    is_tried = world.size >= 4 and world.policy.param_dtype is None
    return name_dimensions(world, are_apart=True) if is_tried else {}


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
    "ignored_params of a module": _with_an_ignored_module,
    "fully_shard of a module with __setattr__": _with_a_module_that_watches,
    "fully_shard of a module with two names": _with_a_shared_module,
    "inference_mode": _in_inference_mode,
    "inference_mode before the first step": _in_inference_mode_before_the_first_step,
    "fully_shard of two modules, one called in chunks": _in_chunks,
    "shard_placement_fn with meshes": _on_two_meshes,
    "set_modules_to_backward_prefetch of an unused module": _with_an_unused_prefetch,
    "dp_mesh_dims": _with_named_dimensions,
    "dp_mesh_dims, shards apart": _with_named_dimensions_apart,
}
"""Options that torch has from 2.13 on, as it has `DataParallelMeshDims`."""
