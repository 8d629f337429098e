"""Parameters that FSDP offloads, read from FSDP's private state for lack of a public attribute.

Where the CPU is also the device of computation, offloading moves nothing: only FSDP's own state shows the policy.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import private_state


def offloading_of(model: nn.Module) -> dict[str, str]:
    """Return `none`, `cpu` or `cpu pinned` for each parameter that FSDP2 manages, by its name in the model.

    `?` stands for the name of a parameter that does not belong to the model. Raises RuntimeError for a version of torch
    whose FSDP keeps the policy elsewhere.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    policies: dict[str, str] = {}
    with private_state(__name__, "what FSDP offloads"):
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
