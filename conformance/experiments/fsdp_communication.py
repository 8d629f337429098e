"""Methods of `FSDPModule` that change how gradients are reduced, and by which collectives."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from conformance.experiments.fsdp_net import DataParallel, Net, Wrong, fsdp_module, fsdp_modules


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


def _with_a_hook_on_a_stream(world: DataParallel) -> Wrong:
    """Run the hook on a further stream, which torch refuses where replicas have one already."""
    stream = torch.get_device_module(world.device).Stream()
    net = world.net()
    try:
        for module in fsdp_modules(net):
            module.set_all_reduce_hook(_triple, stream=stream)
    except ValueError:
        return {"refused without replicas": int(world.mesh.ndim == 1)}
    return {"not refused beside replicas": int(world.mesh.ndim > 1)} | world.wrong(world.backward(net), factor=3.0)


def _triple(reduced: Tensor) -> None:
    reduced.mul_(3)


def _with_unused_parameters_reduced(world: DataParallel) -> Wrong:
    """Use the root's spare layer on the first rank alone: without the method, ranks reduce unequal sizes."""
    wrong: Wrong = {}
    for recurse in (True, False):
        net = world.net()
        fsdp_module(net).set_reduce_scatter_unused_params(True, recurse=recurse)
        net(world.own, with_spare=world.rank == 0).sum().backward()
        single = Net().to(world.device)
        single.spare(world.samples[0]).sum().backward()
        found = world.wrong(net, world.expected(single))
        wrong |= {f"recurse {recurse}, {what}": n for what, n in found.items()}
    return wrong


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
    """Hold up to two inputs of reductions: from the second reduction on one earlier input.

    All modules of a root share the largest number, so that the root's is as good as one for all of them.
    """
    wrong: Wrong = {}
    for recurse in (True, False):
        net = world.net()
        _, reduce = _use_collectives(net)
        fsdp_module(net).set_reduce_scatter_max_input_buffers(2, recurse=recurse)
        found = world.wrong(world.backward(net)) | {"inputs held": int(reduce.held != [0, 1, 1])}
        wrong |= {f"recurse {recurse}, {what}": n for what, n in found.items()}
    return wrong


def _with_more_input_buffers_after_a_step(world: DataParallel) -> Wrong:
    """Hold up to two inputs in the second step alone."""
    net = world.net()
    _, reduce = _use_collectives(net)
    world.backward(net)
    fsdp_module(net).set_reduce_scatter_max_input_buffers(2)
    wrong = world.wrong(world.backward(net), factor=2.0)
    return wrong | {"inputs held": int(reduce.held[3:] != [0, 1, 1])}


def _with_a_group_for_reductions(world: DataParallel) -> Wrong:
    """Reduce in a further group: gradients of the root alone, then of all modules, then of none."""
    net = world.net()
    gather, reduce = _use_collectives(net)
    calls: Mapping[str, Callable[[FSDPModule], None]] = {
        "root": lambda root: root.set_separate_reduce_scatter_group(recurse=False),
        "all": lambda root: root.set_separate_reduce_scatter_group(),
        "none": lambda root: root.set_separate_reduce_scatter_group(False),
    }
    own_groups = {"root": 1, "all": 3, "none": 0}
    """Number of reductions, of those of both layers and the root, that are in another group than the all-gathers."""
    wrong: Wrong = {}
    for index, (name, call) in enumerate(calls.items()):
        call(fsdp_module(net))
        gather.groups.clear()
        reduce.groups.clear()
        world.backward(net)
        own = [group for group in reduce.groups if group not in gather.groups]
        found = world.wrong(net, world.expected(micro_batches=1), factor=index + 1.0)
        wrong |= {f"{name}, {what}": n for what, n in found.items()}
        wrong[f"{name}, own groups"] = abs(len(own) - own_groups[name])
        wrong[f"{name}, different groups"] = max(0, len({*own}) - 1)
    return wrong


COMMUNICATION: Mapping[str, Callable[[DataParallel], Wrong]] = {
    "set_gradient_divide_factor": _with_a_divide_factor,
    "set_all_reduce_hook": _with_a_hook_on_reduced_gradients,
    "set_all_reduce_hook(stream)": _with_a_hook_on_a_stream,
    "set_reduce_scatter_unused_params": _with_unused_parameters_reduced,
    "set_custom_reduce_scatter": _with_custom_collectives,
    "set_reduce_scatter_max_input_buffers": _with_more_input_buffers,
    "set_reduce_scatter_max_input_buffers after a step": _with_more_input_buffers_after_a_step,
    "set_separate_reduce_scatter_group": _with_a_group_for_reductions,
}
"""Uses of methods, by name."""
