"""Private state of FSDP2's modules, for facts without a public attribute: offloading and prefetching.

An error says so if a torch keeps the state elsewhere. Where the CPU is also the device of computation, offloading moves
nothing: only FSDP's own state shows the policy. A list of one group to prefetch has no other visible effect: FSDP
prefetches that group by default.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def private_state(content: str) -> Iterator[None]:
    """Read private attributes of FSDP2 in the context.

    Raises RuntimeError, with the version of torch, instead of AttributeError: this module must be adapted to read the
    content.
    """
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__}: {error}; adapt {__name__}, which reads {content}") from None


def offloading_of(model: nn.Module) -> dict[str, str]:
    """Return `none`, `cpu` or `cpu pinned` for each parameter that FSDP2 manages, by its name in the model.

    `?` stands for the name of a parameter that does not belong to the model. Raises RuntimeError for a version of torch
    whose FSDP keeps the policy elsewhere.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    policies: dict[str, str] = {}
    with private_state("what FSDP offloads"):
        for module in model.modules():
            for managed in _managed(module) if isinstance(module, FSDPModule) else ():
                policies[names.get(id(managed.sharded_param), "?")] = _policy(managed)
    return policies


def _managed(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # several since torch 2.12
        groups = state._fsdp_param_groups
    else:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [managed for group in groups for managed in group.fsdp_params]


def _policy(managed: Any) -> str:
    offloaded = "cpu pinned" if managed.pin_memory else "cpu"
    return offloaded if managed.offload_to_cpu else "none"


def backward_prefetch_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the modules that each FSDP module is configured to prefetch, in order.

    The first of its modules stands for a group of several; modules without a list are left out. Raises RuntimeError for
    a version of torch whose FSDP keeps the lists elsewhere.
    """
    names: dict[Any, str] = {}
    with private_state("what FSDP was told to prefetch"):
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                names.setdefault(module._get_fsdp_state(), name)
        prefetched = {name: [names[to] for to in state._states_to_backward_prefetch] for state, name in names.items()}
    return {name: modules for name, modules in prefetched.items() if modules}


ROOT = "of the root"
"""Name of the group of parameters that belong to the root alone, which has no path."""


def group_modules(owner: object) -> str:
    """Return the paths of a group's modules, joined by commas, if an object is a group of FSDP2; else nothing.

    The group of the root alone is called `ROOT`. Before the first forward groups have no paths.
    """
    if type(owner).__name__ != "FSDPParamGroup":
        return ""
    paths: str | None = getattr(owner, "_module_fqn", None)
    return "" if paths is None else paths or ROOT


def unsharded_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of FSDP2's unsharded parameters that wait for a later micro-batch, by name of the parameter.

    `?` stands for the name of a parameter that is unsharded at present.
    Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere.
    """
    with private_state("which gradients wait for a later micro-batch"):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for managed in _managed(module) if isinstance(module, FSDPModule) else ():
                name = names.get(id(managed.sharded_param), "?")
                unsharded = getattr(managed, "_unsharded_param", None)
                for gradient in (managed.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
                    if gradient is not None:
                        yield name, gradient
