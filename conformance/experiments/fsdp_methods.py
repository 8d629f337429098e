"""Methods of `FSDPModule` that the reference trainer does not use."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.hooks import RemovableHandle

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.fsdp_communication import COMMUNICATION
from conformance.experiments.fsdp_net import (
    DataParallel,
    Net,
    Wrong,
    double,
    fsdp_module,
    fsdp_modules,
    sharded_parameters,
    try_all,
)
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs


@experiment(needs=Needs.TRAINING)
def use_methods(rank: RankWorld) -> dict[str, Wrong]:
    """Try the methods of `FSDPModule` that the installed torch has."""
    missing = tuple(name for name in _NEWER_METHODS if not hasattr(FSDPModule, name))
    return try_all(
        rank, {name: use for name, use in {**_METHODS, **COMMUNICATION}.items() if not name.startswith(missing)}
    )


def _unsharded_ahead(world: DataParallel) -> Wrong:
    net = world.net()
    handle = fsdp_module(net.first).unshard(async_op=True)
    assert handle is not None
    handle.wait()
    unsharded = dict(net.first.named_parameters())
    wrong = {"sharded": sharded_parameters(net.first)}
    single = Net().to(world.device)
    for name, value in single.first.named_parameters():
        wrong[name] = int((full(unsharded[name]) != value).sum())
    wrong |= world.wrong(world.backward(net))
    fsdp_module(net.first).unshard()
    fsdp_module(net.first).reshard()
    return wrong | {"unsharded": len(unsharded) - sharded_parameters(net.first)}


def _kept_after_forward(world: DataParallel) -> Wrong:
    net = world.net()
    fsdp_module(net).set_reshard_after_forward(False)
    out = net(world.own)
    wrong = {"sharded": sharded_parameters(net.first)}
    out.sum().backward()
    return wrong | world.wrong(net) | {"unsharded": 2 - sharded_parameters(net.first)}


def _resharded_after_forward(world: DataParallel) -> Wrong:
    """Reshard the root as well, which `fully_shard` leaves unsharded by default."""
    net = world.net()
    fsdp_module(net).set_reshard_after_forward(True)
    out = net(world.own)
    wrong = {"unsharded": sum(1 for _ in net.parameters()) - sharded_parameters(net)}
    out.sum().backward()
    return wrong | world.wrong(net)


def _kept_after_backward(world: DataParallel) -> Wrong:
    net = world.net()
    fsdp_module(net).set_reshard_after_backward(False)
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
    synchronise(fsdp_module(net), False, recurse=False)
    wrong = {f"{name}, {what}": n for what, n in world.wrong(world.backward(net), first).items()}
    synchronise(fsdp_module(net), True, recurse=False)
    found = world.wrong(world.backward(net, micro_batch=1), world.expected(micro_batches=2))
    return wrong | {f"{name}, at last, {what}": n for what, n in found.items()}


def _kept_by_the_root(world: DataParallel) -> Wrong:
    net = world.net()
    fsdp_module(net).set_reshard_after_forward(False, recurse=False)
    fsdp_module(net).set_reshard_after_backward(False, recurse=False)
    out = net(world.own)
    wrong = _kept_but_by_layers(net, "forward")
    out.sum().backward()
    wrong |= _kept_but_by_layers(net, "backward")
    fsdp_module(net).reshard()
    return wrong | world.wrong(net)


def _kept_but_by_layers(net: Net, phase: str) -> Wrong:
    layers = sharded_parameters(net.first) + sharded_parameters(net.second)
    return {f"layers kept after {phase}": 4 - layers, f"root resharded after {phase}": sharded_parameters(net) - layers}


def _after_an_event(world: DataParallel) -> Wrong:
    """Let all-gathers wait for a recorded event alone: they gather the weights of the step that it follows.

    On a CPU nothing is asynchronous, so that any event is late enough.
    """
    nets = world.backward(world.net()), Net().to(world.device)
    for net in nets:
        double(net)
    event = torch.get_device_module(world.device).current_stream().record_event()
    fsdp_module(nets[0]).set_post_optim_event(event)
    return world.wrong(world.backward(nets[0]), world.expected(nets[1]))


def _before_the_last_backward(world: DataParallel) -> Wrong:
    net = world.net()
    fsdp_module(net).set_is_last_backward(False)
    world.backward(net)
    fsdp_module(net).set_is_last_backward(True)
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


def _stopped_and_reset(
    world: DataParallel, stop: Callable[[Net], RemovableHandle], changed: Net | None = None
) -> Wrong:
    """Stop on all ranks, then reset; training after that is right, of a new net or of one with changed options."""
    net = changed or world.net()
    handle = stop(net)
    with suppress(_Stopped):
        world.backward(net)
        return {"not stopped": 1}
    handle.remove()
    return _wrong_after_reset(world, net)


def _reset_between_micro_batches(world: DataParallel) -> Wrong:
    """Reset after a micro-batch whose reduction was postponed: its gradients must be dropped."""
    net = world.net()
    fsdp_module(net).set_requires_gradient_sync(False)
    world.backward(net)
    fsdp_module(net).set_requires_gradient_sync(True)
    return _wrong_after_reset(world, net)


def _reset_in_a_gather(world: DataParallel) -> Wrong:
    """Reset when a layer's all-gather has begun, and nothing has waited for it."""
    net = world.backward(world.net())
    fsdp_module(net.first).unshard(async_op=True)
    return _wrong_after_reset(world, net)


def _reset_after_a_prefetch(world: DataParallel) -> Wrong:
    """Stop in the first layer's forward, which has prefetched the second one."""
    net = world.net()
    fsdp_module(net.first).set_modules_to_forward_prefetch([fsdp_module(net.second)])
    return _stopped_and_reset(world, lambda net: net.first.register_forward_hook(_stop), net)


def _wrong_after_reset(world: DataParallel, net: Net) -> Wrong:
    """Reset, and train a step with other weights."""
    fsdp_module(net).reset_iter_state()
    wrong = {"unsharded": sum(1 for _ in net.parameters()) - sharded_parameters(net)}
    single = Net().to(world.device)
    for changed in (net, single):
        double(changed)
    return wrong | world.wrong(world.backward(net), world.expected(single))


def _sharded_in_backward(world: DataParallel) -> Wrong:
    """Leave the first layer sharded in backward, which needs its input alone; the second one has to be gathered."""
    net = world.net()
    fsdp_module(net.first).set_unshard_in_backward(False)
    wrong: Wrong = {"unsharded": 2}  # until the hook counts

    def see(module: nn.Module, _: Any, out: Tensor) -> None:
        torch.autograd.graph.register_multi_grad_hook(
            (out,), lambda _: wrong.update({"unsharded": 2 - sharded_parameters(module)})
        )

    net.first.register_forward_hook(see)
    return world.wrong(world.backward(net)) | wrong


_METHODS = {
    "unshard(async_op=True)": _unsharded_ahead,
    "set_reshard_after_forward(False)": _kept_after_forward,
    "set_reshard_after_forward(True)": _resharded_after_forward,
    "set_reshard_after_backward(False)": _kept_after_backward,
    "register_fsdp_forward_method": _by_another_method,
    "set_requires_gradient_sync(recurse=False)": _without_recursion,
    "set_is_last_backward(False)": _before_the_last_backward,
    "reset_iter_state() in forward": _stopped_in_forward_and_reset,
    "reset_iter_state() in backward": _stopped_in_backward_and_reset,
    "reset_iter_state() between micro-batches": _reset_between_micro_batches,
    "reset_iter_state() while parameters are gathered": _reset_in_a_gather,
    "reset_iter_state() after a prefetch": _reset_after_a_prefetch,
    "set_post_optim_event": _after_an_event,
    "set_unshard_in_backward(False)": _sharded_in_backward,
}
_NEWER_METHODS = (
    "set_reduce_scatter_unused_params",
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
)
"""Methods that torch has from 2.13 on."""
